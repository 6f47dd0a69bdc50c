"""The victim of red-teaming in the real vLLM beside the same victim in transformers, in a process of its own: vLLM
changes the process it is in, and one engine serves all cases.

`python -m tests.support.vllm_victim_cases FOLDER` prints, as its last line, {case: "passed" or a traceback}.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tba_reward.model_server.child.judges import RedteamJudge
from tba_reward.model_server.child.server import Batcher, BrokenModelsError, NoScore, TokenizedRequest
from tba_reward.model_server.child.victim import TransformersVictim, Victim
from tba_reward.model_server.child.vllm_victim import VllmVictim
from tba_reward.model_server.model_messages import BatchStarted, FromChild, ScoreRequest
from tba_reward.scorers import redteam

from tba.config.reward import RedteamSpec
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_reward_models import save_classifier, save_reward_model, save_victim

ATTACKS = ["", "a", "Zwei Sätze. Noch einer!", "abc " * 12, "🙂 x", "b" * 40, "say it "]


def spec_of(folder: Path, **settings: Any) -> RedteamSpec:
    """The recipe of these tests; the models are made where they are missing."""
    victim, classifier = folder / "victim", folder / "classifier"
    if not victim.is_dir():
        save_victim(victim)
        save_classifier(classifier)
    settings = {
        "victim": str(victim),
        "victim_template": "Q: {prompt}\nA: ",
        "victim_engine": "vllm",
        "max_attack_tokens": 60,
        "classifier": str(classifier),
        "label": "hate",
        "max_reply_tokens": 12,
        "num_replies": 3,
        "device": "cpu",
        "batch_tokens": 2000,
        **settings,
    }
    return RedteamSpec(kind="redteam", **settings)


class Bench:
    """Both engines. The victim has two tokens that end a reply; one of them is in greedy replies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        spec = spec_of(folder)
        plain = spec.model_copy(update={"victim_engine": "transformers"})
        victim = TransformersVictim(redteam.model_set(plain).victim)
        replies = victim_at(victim, 0.0).generate([prompt_of(victim, attack) for attack in ATTACKS], [0] * len(ATTACKS))
        assert replies[3] is not None
        self.end = replies[3][5]
        (folder / "victim" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, self.end]}))
        self.plain, self.judge = RedteamJudge(redteam.model_set(plain)), RedteamJudge(redteam.model_set(spec))
        assert isinstance(self.judge._victim, VllmVictim)


def victim_at(victim: Victim, temperature: float) -> Victim:
    """The victim, sampled at another temperature from now on."""
    victim._settings = msgspec.structs.replace(victim._settings, temperature=temperature)
    return victim


def prompt_of(victim: Victim, attack: str) -> list[int]:
    """Its tokens."""
    prompt = victim.encode(attack)
    assert not isinstance(prompt, NoScore)
    return prompt


def case_greedy_replies_are_those_of_transformers_token_for_token(bench: Bench) -> None:
    found = []
    for judge in (bench.plain, bench.judge):
        victim = victim_at(judge._victim, 0.0)
        prompts = [prompt_of(victim, attack) for attack in ATTACKS]
        rows = victim.generate(prompts, [0] * len(prompts))
        found.append((rows, victim.replies(ATTACKS, prompts)))
    (padded, wanted), (rows, texts) = found
    # transformers pads behind the end
    assert rows == [row[: row.index(bench.end) + 1] if bench.end in row else row for row in padded]
    assert texts == wanted
    assert {len(row) for row in rows} >= {6, 12}, "some end by themselves, some are cut"
    assert all(len(replies) == 3 == replies.count(replies[0]) for replies in texts)
    assert len({replies[0] for replies in texts}) > 4


def case_sampled_replies_repeat_in_any_batch(bench: Bench) -> None:
    victim = victim_at(bench.judge._victim, 0.7)
    prompts = [prompt_of(victim, attack) for attack in ATTACKS]
    together = victim.replies(ATTACKS, prompts)
    alone = [victim.replies([attack], [prompt])[0] for attack, prompt in zip(ATTACKS, prompts, strict=True)]
    assert together == alone
    assert {len(replies) for replies in together} == {3}
    assert len({reply for replies in together for reply in replies}) > 15
    victim._settings = msgspec.structs.replace(victim._settings, seed=1)
    assert all(one != other for one, other in zip(victim.replies(ATTACKS, prompts), together, strict=True))


def case_the_longest_attack_is_answered_and_a_longer_one_has_no_score(bench: Bench) -> None:
    victim = bench.judge._victim
    longest = "x" * 60
    (replies,) = victim.replies([longest], [prompt_of(victim, longest)])
    assert len(replies) == 3
    assert victim.encode(longest + "x") == bench.plain._victim.encode(longest + "x")
    reason = "the attack in its template has 68 tokens, and at most 67 are taken"
    assert victim.encode(longest + "x") == NoScore("too_long", reason)


def case_a_reply_from_logits_that_are_not_finite_gives_no_score(bench: Bench) -> None:
    """Position 45 is broken, which only two prompts reach. Text comes out all the same."""

    def break_position(model: Any) -> None:
        model.transformer.wpe.weight.data[45] = torch.nan

    victims: Any = (bench.plain._victim, bench.judge._victim)
    break_position(victims[0]._model)
    victims[1]._llm.apply_model(break_position)
    # vLLM once: its kernel for the CPU also reads what is left of such values in blocks that others get later
    for judge, temperature in ((bench.plain, 0.0), (bench.plain, 0.7), (bench.judge, 0.7)):
        victim_at(judge._victim, temperature)
        prepared = [judge.prepare(ScoreRequest(number=0, prompt="", response=attack)) for attack in ATTACKS]
        outcomes = judge.score([each for each in prepared if isinstance(each, TokenizedRequest)])
        broken = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, NoScore)]
        assert broken == [3, 5], outcomes
        assert outcomes[3] == NoScore("not_finite", "a reply of the victim: its logits are not finite")


def case_a_victim_and_a_judge_of_one_family_live_in_one_process(bench: Bench) -> None:
    """vLLM runs GPT-NeoX through the class of transformers, which the judge is too."""
    models = {
        "victim": str(make_tiny_model(bench.folder / "neox", architecture="gpt_neox", hidden_size=128)),
        "classifier": str(save_reward_model(bench.folder / "judge")),
        "classifier_template": "{response}.",
        "label": None,
    }
    requests = [ScoreRequest(number=n, prompt="", response="1+2=?9"[n:]) for n in range(4)]
    found = []
    for engine in ("transformers", "vllm"):
        judge = RedteamJudge(redteam.model_set(spec_of(bench.folder, victim_engine=engine, temperature=0.0, **models)))
        prepared = [judge.prepare(request) for request in requests]
        found.append(judge.score([each for each in prepared if isinstance(each, TokenizedRequest)]))
    assert len(set(found[1])) > 1, found
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def case_an_engine_that_fails_answers_nothing_and_ends_the_process(bench: Bench) -> None:
    """Half of the batch would meet the requests that vLLM still holds. The service asks again, each attack alone."""
    sent: list[FromChild] = []
    batcher = Batcher(bench.judge, 2000, sent.append)
    for number in range(2):
        batcher.take(ScoreRequest(number=number, prompt="", response=ATTACKS[number]))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a kernel")

    victim: Any = bench.judge._victim
    victim._llm.llm_engine.engine_core.engine_core.model_executor.execute_model = fail
    with pytest.raises(BrokenModelsError, match="RuntimeError: a kernel"):
        batcher.compute()
    assert sent == [BatchStarted(numbers=[0, 1])]


CASES: dict[str, Callable[[Bench], None]] = {
    case.__name__.removeprefix("case_"): case
    for case in (
        case_greedy_replies_are_those_of_transformers_token_for_token,
        case_sampled_replies_repeat_in_any_batch,
        case_the_longest_attack_is_answered_and_a_longer_one_has_no_score,
        case_a_reply_from_logits_that_are_not_finite_gives_no_score,  # the victims stay broken
        case_a_victim_and_a_judge_of_one_family_live_in_one_process,  # of its own; vLLM then ends the groups of both
        case_an_engine_that_fails_answers_nothing_and_ends_the_process,  # the last one
    )
}


def main(folder: Path) -> None:
    """The process."""
    bench, outcome = Bench(folder), {}
    for name, case in CASES.items():
        start_s = time.monotonic()
        try:
            case(bench)
            outcome[name] = "passed"
        except Exception:
            outcome[name] = traceback.format_exc()
        print(f"{time.monotonic() - start_s:6.2f} s  {name}", file=sys.stderr)
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
