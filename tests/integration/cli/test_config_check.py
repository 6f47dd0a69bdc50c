"""`tba config check`: what would fail after `tba run` has begun is found before, each fault with a remedy."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tba.api import Prompt, ScoreError, ScoreResult
from tba.clients import RewardClient
from tba.errors import ConfigError
from tba_cli.doctor.checks.recipe import Trial
from tba_cli.local import reward_service
from tba_cli.local.reward_trial import _alike
from tba_cli.main import main
from tba_cli.reports.sample import SampledAnswer
from tests.support.broken_weights import break_weights
from tests.support.local_workplace import wait_until
from tests.support.tiny_model import make_tiny_model

GRADERS = """
def same(prompts, completions, answer, **kwargs):
    return [float(a == c) for a, c in zip(answer, completions)]

def lengths(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def flat(prompts, completions, **kwargs):
    return [0.0 for _ in completions]

def picky(prompts, completions, **kwargs):
    return [{"1": 0.0, "2": 1.0}[c] for c in completions]

def broken(prompts, completions, **kwargs):
    raise KeyError("gold")

def number(prompts, completions, answer, **kwargs):
    return [float(int(c) == int(a)) if c else None for c, a in zip(completions, answer)]

def one(completions, **kwargs):
    return [1.0]

def of_some(completions, **kwargs):
    return [1.0 for c in completions if c]
"""
Check = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def rows(task: str = "mine") -> list[dict[str, Any]]:
    row = {"task": task, "data": {"answer": "2"}}
    texts = {"train": "1+1=", "heldout": "2+0="}
    return [row | {"prompt_id": split, "split": split, "text": text} for split, text in texts.items()]


@pytest.fixture
def check(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Write recipe and prompts, run the command; (exit code, output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "graders.py").write_text(GRADERS)
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows())))

    def run(*words: str, command: Any = ("config", "check"), function: str = "graders:same", **sections: Any) -> Any:
        tasks = {"mine": {"scorers": [{"kind": "python", "function": function}]}}
        document: dict[str, dict[str, Any]] = {"run": {"name": "demo"}, "model": {"path": str(model)}}
        document |= {"data": {"path": "prompts.jsonl"}, "buffer": {"port": 0}, "reward": {"port": 0, "tasks": tasks}}
        document["sampling"] = {"prompts_per_batch": 1}
        document["searcher"] = {"max_prompt_tokens": 16, "max_response_tokens": 16}
        for name, values in sections.items():
            document[name] = {**document.get(name, {}), **values}
        (tmp_path / "recipe.json").write_text(json.dumps(document))
        code = main([*command, "recipe.json", *words])
        assert not (tmp_path / "runs" / "demo").exists()
        return code, "".join(capsys.readouterr())

    return run


def failures(out: str) -> list[str]:
    """Return the faults that were found, each with its remedy."""
    lines = out.splitlines()
    found = [at for at, line in enumerate(lines) if line.startswith("FAIL ")]
    assert all(lines[at + 1].startswith("     fix: ") for at in found)
    return [lines[at] + lines[at + 1] for at in found]


def test_a_good_recipe_passes_with_everything_looked_at(check: Check) -> None:
    code, out = check()
    assert code == 0, out
    assert failures(out) == []
    assert "ok   prompts: 1 to train on, 1 held out" in out
    assert "21 tensors" in out
    assert "ok   tokenizer: LlamaForCausalLM" in out
    assert "ok   prompt-length: prompts have up to 4 tokens" in out
    assert "ok   scorer: task 'mine': made-up responses score: '1' 0, data.answer '2' 1" in out
    assert "recipe.json: ok (run 'demo'" in out
    assert "not checked" not in out


GRADER = {"kind": "python"}
OF_COLUMNS = "'2' 0, data.level '1' 0, data.gold '3' 1"
TRIED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # an answer in a box, behind reasoning, in a format, in another column; one that is else the wrong response
    "box": ({"kind": "math"}, {"answer": "2"}, "1+1=", "'1' 0, data.answer '2' 0, data.answer in a box 1"),
    "reasoning": ({"kind": "last_number"}, {"answer": 2}, "1+1=<think>\n", "'1' 0, data.answer '2' 0"),
    "format": ({"kind": "format", "pattern": "=.*"}, {"answer": "2"}, "1+1=", "'1' 0, data.answer '2' 0"),
    "column": ({"kind": "exact", "field": "gold"}, {"level": 1, "gold": "3"}, "1+1=", OF_COLUMNS),
    "one": ({"kind": "exact"}, {"answer": "1"}, "1*1=", "'2' 0, data.answer '1' 1"),
    # a function of token ids gets some
    "lengths": ({**GRADER, "function": "graders:lengths"}, {"answer": "2"}, "1+1=", "score 1 ('1', data.answer '2');"),
    "flat": ({**GRADER, "function": "graders:flat"}, {"answer": "2"}, "1+1=", "score 0 ('1', data.answer '2');"),
    "broken": ({**GRADER, "function": "graders:broken"}, {"answer": "2"}, "1+1=", "exception: KeyError: 'gold'"),
}
"""Task -> scorer, data and text of its prompts, and what is said."""


def test_the_values_of_the_data_are_tried_as_responses_of_every_task(check: Check, tmp_path: Path) -> None:
    prompts = [
        row | {"prompt_id": f"{task}-{row['split']}", "task": task, "data": data, "text": text}
        for task, (_, data, text, _) in TRIED.items()
        for row in rows()
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    tasks = {task: {"scorers": [scorer]} for task, (scorer, *_) in TRIED.items()}
    _, out = check(reward={"tasks": tasks}, model={"path": "nowhere"})
    for task, (*_, said) in TRIED.items():
        # where all is the same, the reward may not be about the answer, and the fix says so
        expected = f"WARN scorer: task '{task}': all responses that were tried {said}"
        if task == "broken":
            expected = f"FAIL scorer: task 'broken' scores nothing: {said}"
        elif task not in ("lengths", "flat"):
            expected = f"ok   scorer: task '{task}': made-up responses score: {said}\n"
        assert expected in out, out
    assert "`tba score FILE --recipe recipe.json`, where FILE holds responses of your own" in out


def test_what_a_function_raises_for_some_responses_is_said_with_the_line(check: Check, tmp_path: Path) -> None:
    """Odd responses, and the answers of other prompts; that it abstains from an empty one is its own affair."""
    golds = {"a": "2", "b": "3", "c": "1,000"}
    more = [rows()[0] | {"prompt_id": name, "data": {"answer": gold}} for name, gold in golds.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, [*rows(), *more])))
    _, out = check(function="graders:number", model={"path": "nowhere"})
    line = GRADERS.split("\n").index("def number(prompts, completions, answer, **kwargs):") + 2
    assert "WARN scorer: task 'mine': 3 of 10 made-up responses have no score: 'I do not know.' (exception: " in out
    assert f"invalid literal for int() with base 10: 'I do not know.' (graders.py:{line}))" in out
    assert "data.answer '1,000' of prompt 'c' (exception: " in out


@pytest.mark.parametrize(("function", "level"), [("graders:one", "FAIL"), ("graders:of_some", "WARN")])
def test_a_list_of_the_wrong_length_is_found_also_where_prompts_have_no_data(check, tmp_path, function, level) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row | {"data": {}}) for row in rows()))
    _, out = check(function=function, model={"path": "nowhere"})
    (line,) = [line for line in out.splitlines() if "one score for each completion" in line]
    assert line.startswith(f"{level} scorer: "), line


def test_the_columns_of_every_row_are_compared_with_what_the_scorer_needs(check: Check, tmp_path: Path) -> None:
    """Also of the last ones, and where only few rows are wrong; each of them would be generated for in vain."""
    row = {"task": "mine", "text": "1+1=", "split": "train"}
    data = [{"answer": "2"}] * 40 + [{"gold": "2"}] * 3 + [{}] + [{f"c{n}": 1, "answer": "2"} for n in range(16)]
    lines = [*rows(), *(row | {"prompt_id": str(number), "data": each} for number, each in enumerate(data))]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out = check(model={"path": "nowhere"})
    assert code == 1
    found = "of 62 prompts of task 'mine' cannot be scored, first"
    needs = "their data have the columns gold; graders:same needs the column 'answer',"
    assert f"FAIL scorer: 3 {found} '40': {needs}" in out
    assert f"FAIL scorer: 1 {found} '43': their data have the columns none; graders:same needs" in out
    assert "ok   scorer: task 'mine': made-up responses score: '1' 0, data.answer '2' 1\n" in out
    assert "-    scorer: task 'mine': 3 prompts, whose data have rarer columns, were not tried" in out
    alike = _alike([Prompt.model_validate(each) for each in lines])["mine"]
    known = ScoreResult(item_id="1", reward=0.0)
    lacks = ScoreResult(item_id="1", error=ScoreError(reason="bad_data", detail="no answer"))
    # as `tba run` says it; also where these are the commonest
    both = [(known, lacks, "3 of 62 prompts"), (lacks, known, "42 of 62 prompts"), (lacks, lacks, "scores nothing")]
    for first, second, said in both:
        sets = [replace(alike[0], results=[("'1'", first)]), replace(alike[1], results=[("'1'", second)])]
        trial = Trial(tried={"mine": sets})
        with pytest.raises(ConfigError, match=said):
            trial.check()


ENDLESS = {"mine": {"min_response_tokens": 16}}
CUT = {"objective": {"preset": "tb"}, "searcher": {"tasks": ENDLESS}, "sampling": {"group_size": 4}}


def test_the_real_model_is_asked_after_the_checks(check: Check, tmp_path: Path) -> None:
    """Two tasks take turns; the answers of one of them cannot end before the limit."""
    row = {"split": "train", "text": "1+1=", "data": {"answer": "2"}}
    more = [row | {"task": task, "prompt_id": f"{task}-{n}"} for n in range(4) for task in ("mine", "exact")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, [*rows(), *more])))
    code, out = check("--sample", "3", "--json", function="graders:lengths", **CUT)
    found = json.loads(out)
    mine, exact = sorted(found["sample"]["tasks"], key=lambda each: each["task"], reverse=True)
    assert (code, sorted(each["num_prompts"] for each in (mine, exact))) == (0, [1, 2])
    assert mine["num_answers"] == mine["num_cut"] == 4 * mine["num_prompts"]
    assert (mine["mean_response_tokens"], mine["mean_reward"]["value"], mine["reward_range"]) == (16, 16, [16, 16])
    assert mine["num_groups"] == mine["num_equal"] == mine["num_prompts"]
    said = f"{mine['num_cut']} of {mine['num_answers']} answers are cut at searcher.max_response_tokens (16)"
    cut = next(each for each in found["results"] if each["found"] == said)
    assert (cut["code"], cut["level"], "raise searcher.max_response_tokens" in cut["fix"]) == ("sample", "warn", True)
    assert (found["sample"]["best"]["reward"], found["sample"]["worst"]["task"]) == (16, "exact")
    lines = (tmp_path / "evaluations/demo/sample/completions.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["mode"] for line in lines) == ["sampled"] * 12


def test_of_equal_rewards_the_scorer_is_named_first_if_it_pays_no_gold_answer(check: Check, monkeypatch) -> None:
    fields = {"num_response_tokens": 4, "response_text": "2", "finish_reason": "stop", "reward_reason": None}
    answer = SampledAnswer(task="mine", prompt_id="train", prompt_text="1+1=", reward=0.0, **fields)
    monkeypatch.setattr("tba_cli.commands.evaluate.sample_answers", lambda *_: [[answer, answer]])
    code, out = check("--sample", "1", function="graders:flat")
    assert (code, "fix: look at the scorer first (the warning above), then take easier prompts" in out) == (0, True), (
        out
    )
    assert "recipe.json: ok, with 2 warnings (run 'demo'" in out


def test_answers_without_any_reward_are_a_failure(check: Check) -> None:
    code, out = check("--sample", "1", function="graders:picky", **CUT)
    (found,) = failures(out)
    assert (code, "sample: no answer has a reward: exception" in found) == (1, True)
    assert "4 of 4 completions" in out, "it says how far it is"
    assert "best answer: reward unknown (exception), 16 tokens, length\n  prompt train:\n    | 1+1=\n" in out


def test_the_model_is_asked_only_if_the_checks_pass(check: Check, tmp_path: Path) -> None:
    code, out = check("--sample", "1", function="graders:broken")
    assert (code, "-    sample: " in out) == (1, True), out
    assert check("--sample", "0")[0] == 2
    assert not (tmp_path / "evaluations").exists()


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(check: Check, tmp_path: Path, model: Path) -> None:
    """It has ids that the model lacks: of plain tokens, or of special ones in prompts. Or its main file is missing."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row | {"text": "<turn>1"}) for row in rows()))
    for kind, said in (("plain", "'<plus>'"), ("special", "'<turn>' (id 33)"), ("none", "without tokenizer.json")):
        folder = shutil.copytree(model, tmp_path / kind)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<plus>" if kind == "plain" else "<turn>"], special_tokens=kind != "plain")
        tokenizer.save_pretrained(folder)
        if kind == "none":  # transformers makes an empty one of this class
            (folder / "tokenizer.json").unlink()
            settings = (folder / "tokenizer_config.json").read_text()
            (folder / "tokenizer_config.json").write_text(settings.replace("TokenizersBackend", "GPT2Tokenizer"))
        code, out = check(model={"path": str(folder)}, reward={"tasks": {"mine": {"scorers": [{"kind": "exact"}]}}})
        found = [line for line in failures(out) if line.startswith("FAIL tokenizer: ")]
        assert (code, len(found), said in "".join(found)) == (1, 1, True), out


def test_characters_that_the_tokenizer_does_not_know_are_named(check: Check, tmp_path: Path) -> None:
    changed = [row | {"text": text} for row, text in zip(rows(), ("1\u00d71=", "1\u00d7\u00d71\u00f7"), strict=True)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, [*changed, rows()[0] | {"prompt_id": "c"}])))
    _, out = check(reward={"tasks": {}})
    expected = "WARN tokenizer: 2 of 3 prompts contain '\u00d7' or '\u00f7', which the tokenizer does not know;"
    assert expected in out, out


OF_THE_HUB = {"task": "mine", "dataset": "org/nowhere", "column": "question", "train": "train", "heldout": "test"}
JUDGE = {"scorers": [{"kind": "http", "url": "http://127.0.0.1:9/v1/score"}]}
NO_NETWORK = "-    prompts: --offline: a network would be needed for org/nowhere"
ELSEWHERE = "-    scorer: task 'mine': scorer 'http' asks an endpoint elsewhere"
UNREADABLE = "nothing.jsonl cannot be read: No such file"
WARM = {"path": "later", "warm_start": {"task": "addition"}}
OFFLINE = {"data": {"path": None, "sets": [OF_THE_HUB]}, "reward": {"tasks": {"mine": JUDGE}}}


@pytest.mark.parametrize(
    ("sections", "code", "said"),
    [
        ({"model": WARM}, 0, ["later is not there yet"]),
        ({"model": {"path": "org/name"}}, 0, ["tba run` fetches or makes it", "ok   prompts: "]),
        ({"data": {"path": "nothing.jsonl"}}, 1, [UNREADABLE, "-    tokenizer: there are no prompts to tokenize"]),
        (OFFLINE, 0, [NO_NETWORK, ELSEWHERE, "; not checked: 3 things"]),
    ],
    ids=["warm start", "hub model", "no prompts", "no network"],
)
def test_what_is_not_there_or_needs_a_network_is_said(check: Check, sections: dict, code: int, said: list[str]) -> None:
    found, out = check("--offline", **{"reward": {"tasks": {"mine": {"scorers": [{"kind": "exact"}]}}}, **sections})
    assert (found, [text for text in said if text not in out]) == (code, []), out


def test_every_fault_is_found_in_one_go(check: Check, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows("nobody"))))
    code, out = check(model={"path": "nowhere"}, function="graders:smae")
    assert code == 1
    found = failures(out)
    task, function = "the task 'nobody', which no reward scores", "module 'graders' has no attribute 'smae'"
    for sentence in (task, "nowhere (model.path)", function):
        assert any(sentence in line for line in found), (sentence, out)
    assert f"recipe.json: {len(found)} things would fail" in out


def test_a_scorer_that_does_not_come_up_in_time_is_quoted(check: Check, tmp_path, monkeypatch) -> None:
    """The folder of its log is gone before the log is read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "slow.py").write_text("import time\nprint('waiting for card 7', flush=True)\ntime.sleep(3600)\n")

    async def not_in_time(client: RewardClient, ca_file: str | None, **_: object) -> None:
        while not any("card 7" in log.read_text() for log in tmp_path.glob("tba-check-*/logs/reward.log")):
            await asyncio.sleep(0.1)
        raise TimeoutError

    monkeypatch.setattr(reward_service, "wait_for_reward", not_in_time)
    code, out = check(function="slow:same", model={"path": "nowhere"})
    assert code == 1
    (line,) = [line for line in failures(out) if line.startswith("FAIL scorer: ")]
    assert "was not ready within 120 s (local.start_timeout_s); its log ends with: " in line
    assert "waiting for card 7" in line
    assert str(tmp_path) not in line
    assert line.endswith("fix: fix what the scorers wait for, or raise local.start_timeout_s")


def test_a_reward_without_prompts_a_prompt_of_both_splits_and_another_temperature_are_warnings(check, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row | {"text": "1+1="}) for row in rows()))
    tasks = {name: {"scorers": [{"kind": "exact"}]} for name in ("mime", "judged", "mine")}
    warm = {"model": {"path": "nowhere", "policy_temperature": 0.7}, "searcher": {"sampling_temperature": 1.0}}
    judged = {"published": {"tasks": ["judged"]}}
    code, out = check(reward={"tasks": tasks}, eval=judged, objective={"preset": "tb"}, **warm)
    assert code == 1  # for the model alone
    prompts, reward, temperature = (line for line in out.splitlines() if line.startswith("WARN "))
    expected = "WARN prompts: 1 of 1 held-out prompts have the text of a prompt that is trained on"
    assert prompts.startswith(expected)
    assert reward == "WARN reward-task: no prompt has the task 'mime', so reward.tasks.mime scores nothing"
    expected = "WARN temperature: searcher.sampling_temperature is 1, and model.policy_temperature is 0.7"
    assert temperature.startswith(expected)


HANGS = """
import time
from pathlib import Path

def prompts(num_train, num_heldout, seed):
    time.sleep(1)  # the check of the scorers could have begun by now
    Path("reading").touch()
    time.sleep(3600)
"""
CHECK_IT = """
import sys
from tba_cli.doctor.checks.recipe import RecipeChecks
from tba_cli.local import reward_trial
from tba_cli.main import main
from tba_cli.reports.sample import SampledAnswer

async def start_nothing(*args):
    pass

RecipeChecks.timeout_s = float(sys.argv[1])
reward_trial.start_reward = start_nothing
sys.exit(main(["config", "check", "recipe.json"]))
"""


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_check_of_prompts_that_are_never_read_ends(check: Check, tmp_path: Path, is_interrupted: bool) -> None:
    (tmp_path / "generator.py").write_text(HANGS)
    recipe = {"run": {"name": "demo"}, "model": {"path": "nowhere"}, "data": {"generator": "generator:prompts"}}
    tasks = {"mine": {"scorers": [{"kind": "exact"}]}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"reward": {"tasks": tasks}}))
    words = [sys.executable, "-c", CHECK_IT, "3600" if is_interrupted else "4"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            if is_interrupted:
                wait_until("prompts are read", (tmp_path / "reading").exists)
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    if is_interrupted:
        assert process.returncode == 130
        return
    assert process.returncode == 1
    timeouts = [line for line in failures(out) if line.startswith("FAIL check-timeout")]
    assert len(timeouts) == 1, "what waits for the prompts has a deadline of its own"
    assert "the check 'prompts' did not end" in timeouts[0]
    assert "-    tokenizer: there are no prompts to tokenize" in out


def test_a_model_whose_config_cannot_be_read_is_named(check: Check, tmp_path: Path, model: Path) -> None:
    spoiled = shutil.copytree(model, tmp_path / "spoiled")
    (spoiled / "config.json").write_text("{}")
    code, out = check(reward={"tasks": {}}, data={"path": None, "generator": "addition"}, model={"path": str(spoiled)})
    assert code == 1
    assert any("config or tokenizer cannot be loaded" in line for line in failures(out)), out


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no head", "lacks weights of a LlamaForCausalLM: lm_head.weight"),
        ("chunks", "does not decode layers of kind chunked_attention"),
    ],
)
def test_a_model_that_nothing_can_be_learned_with_is_named_before_a_child_is_started(check, tmp_path, fault, sentence):
    folder = make_tiny_model(tmp_path / "own")
    if fault == "no head":
        break_weights(folder, fault)
    else:
        config = json.loads((folder / "config.json").read_text())
        layers = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}
        (folder / "config.json").write_text(json.dumps(config | layers))
    data = {"path": None, "generator": "addition"}
    code, said = check(command=("run",), model={"path": str(folder)}, data=data, reward={"tasks": {}})
    assert (code, sentence in said) == (2, True), said


SHOP = """
class Shop:
    def reset(self, seed, data):
        return data["x"]

    step = close = reset
"""


@pytest.mark.parametrize(("command", "expected"), [(("config", "check"), 1), (("run",), 2)])
def test_an_environment_that_fails_is_named_before_a_child_is_started(check, tmp_path, command, expected):
    (tmp_path / "shop.py").write_text(SHOP)
    code, said = check(command=command, environments={"mine": {"environment": "shop:Shop"}}, reward={"tasks": {}})
    assert code == expected, said
    assert "environments.mine: reset for prompt 'train': reset raised KeyError: 'x' (shop.py:4)" in said
