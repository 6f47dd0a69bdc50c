"""Conversations in the buffer: pushed, drawn, read, filtered and deduplicated as rollouts of one turn are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow.parquet import read_metadata
from redis import Redis

from tba.api import Prompt
from tba.versions import START
from tba.wire import Rollout, VersionSpan, encode_rollout, new_rollout_id
from tests.support.buffer import make_rollout
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import draw
from tests.support.rollout_values import replace
from tests.support.wire_values import conversation


def seed_of(prompt_id: str) -> int:
    return Prompt(prompt_id=prompt_id, task="addition", text="?", data={"answer": 0}).environment_seed


def talk(prompt_id: str = "train-0", *, reward: float | None = 1.0, **episode: Any) -> Rollout:
    """Return a conversation of nine sampled tokens that answers a prompt of the run."""
    plain, spoken = make_rollout(prompt_id, reward=reward), conversation()
    assert spoken.episode is not None
    whole = replace(spoken.episode, **{"seed": seed_of(prompt_id), **episode})
    spans, logprobs = (VersionSpan.of(START, 0, 9),), np.full(9, -0.5)
    known = replace(plain, version_spans=spans, sampler_logprobs=logprobs, response_text="six")
    return replace(known, rollout_id=new_rollout_id(), sequences=spoken.sequences, episode=whole)


def test_conversations_are_drawn_and_shown_whole(serve_buffer: ServeBuffer) -> None:
    served = serve_buffer(sampling={"group_size": 2, "prompts_per_batch": 2, "min_size_to_sample": 4})
    client, lineage = served.begin(2)
    pushed = [talk(f"train-{n % 2}", reward=float(n)) for n in range(4)]
    assert {each.outcome for each in client.push([encode_rollout(each) for each in pushed]).outcomes} == {"new"}
    batch = draw(client, lineage, wait_s=5)
    by_id = {each.rollout_id: each for each in pushed}
    for rollout in batch.rollouts:
        assert encode_rollout(rollout) == encode_rollout(by_id[rollout.rollout_id])
    stats = client.stats()
    assert stats.tokens is not None
    assert stats.tokens.generated == 4 * 9  # tokens of the environment were not generated
    shown = client.get_rollout(pushed[0].rollout_id.hex())
    assert shown.sequences is not None
    assert shown.messages is not None
    assert shown.episode is not None
    assert [each.tokens for each in shown.sequences] == [each.tokens.tolist() for each in pushed[0].sequences]
    found = [
        (each.role, each.origin, each.num_tokens, each.turn, each.is_trained) for each in shown.sequences[1].segments
    ]
    assert found[:2] == [("user", "environment", 4, 0, False), ("assistant", "policy", 4, 0, False)]
    assert found[2:4] == [("user", "environment", 2, 2, False), ("assistant", "policy", 2, 2, True)]
    assert (shown.num_prompt_tokens, shown.num_response_tokens, shown.finish_reason) == (5, 9, "length")
    assert (shown.episode.num_turns, shown.episode.num_tool_calls, shown.episode.stop_condition) == (3, 1, "max_turns")
    assert [(each.role, each.content, each.turn) for each in shown.messages] == [
        ("user", "What is 2 * 3?", 0),
        ("tool", "6", 1),
    ]
    plain = make_rollout()
    client.push([encode_rollout(plain)])
    assert client.get_rollout(plain.rollout_id.hex()).episode is None
    assert {each.rollout_id for each in client.list_rollouts(finish_reason="stop").rollouts} == {plain.rollout_id.hex()}
    assert len(client.list_rollouts(finish_reason="length").rollouts) == 4


def test_episodes_are_filtered_by_environment_and_by_how_they_ended(serve_buffer: ServeBuffer, tmp_path: Path) -> None:
    client = serve_buffer().with_prompts(1)
    pushed = {
        "plain": make_rollout(),
        "cut": talk(),
        "unpaid": talk(reward=None).with_failure("limit step: max_turns"),
        "tool": talk(reward=None, stop_condition="tool_failed").with_failure("tool step: tool buy: away"),
        "shop": talk(environment="shop", stop_condition="done"),
        # of a scorer and not of the episode
        "score": talk(reward=None, environment="shop").with_failure("tool: the scorer is away"),
    }
    client.push([encode_rollout(each) for each in pushed.values()])
    names = {each.rollout_id.hex(): name for name, each in pushed.items()}
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"environment": "shop"}, {"shop", "score"}),
        ({"stop_condition": "max_turns"}, {"cut", "unpaid", "score"}),
        ({"stop_condition": "max_turns", "environment": "calculator", "status": "scored"}, {"cut"}),
        ({"failure_boundary": "tool"}, {"tool"}),
        ({"failure_boundary": "limit"}, {"unpaid"}),
        ({"failure_boundary": "engine"}, set()),
    ]
    for filters, expected in cases:
        found = client.list_rollouts(**filters).rollouts
        assert {names[each.rollout_id] for each in found} == expected, filters
        client.export_rollouts(path := tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet", **filters)
        assert read_metadata(path).num_rows == len(expected)
        for each in found if "failure_boundary" in filters else ():
            assert each.episode is not None
            assert each.episode.failure_boundary == filters["failure_boundary"]


def test_a_group_compares_episodes_of_one_seed_and_one_seat(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(2)
    other = seed_of("train-1")
    pushed = [talk(), talk(seed=other), talk(seat=1), talk("train-1")]
    outcomes = client.push([encode_rollout(each) for each in pushed]).outcomes
    assert [(each.outcome, (each.reason or "").split(":")[0]) for each in outcomes] == [
        ("new", ""),
        ("refused", "other-group"),
        ("refused", "other-group"),
        ("new", ""),
    ]


def test_the_seed_of_a_prompt_is_its_own_or_follows_from_its_id() -> None:
    given = Prompt(prompt_id="a", task="t", text="?", data={"seed": 12})
    assert given.environment_seed == 12
    one, two = (Prompt(prompt_id=name, task="t", text="?").environment_seed for name in ("a", "b"))
    assert one == Prompt(prompt_id="a", task="u", text="!", data={"seed": "12"}).environment_seed
    assert one != two
    assert 0 <= one < 2**56


@pytest.mark.parametrize(("prompt", "response", "outcome"), [(4, 11, "new"), (12, 3, "refused"), (2, 4, "refused")])
def test_replies_and_sequences_have_limits(serve_buffer: ServeBuffer, prompt: int, response: int, outcome: str) -> None:
    """A sequence may show more than a prompt before its first trained reply, if the engine's context holds it."""
    sections = {"max_prompt_tokens": prompt, "max_response_tokens": response}
    (found,) = serve_buffer(searcher=sections).with_prompts(1).push([encode_rollout(talk())]).outcomes
    assert (found.outcome, (found.reason or "").startswith("too-long: ")) == (outcome, outcome == "refused")


def test_all_sequences_fit_into_a_pass_of_the_trainer(serve_buffer: ServeBuffer) -> None:
    sections = {"searcher": {"max_prompt_tokens": 6, "max_response_tokens": 9}}
    client = serve_buffer(trainer={"micro_batch_tokens": 29}, **sections).with_prompts(1)
    (found,) = client.push([encode_rollout(talk())]).outcomes
    assert (found.outcome, (found.reason or "").split(":")[0]) == ("refused", "too-long")
    assert "trainer.micro_batch_tokens" in (found.reason or "")


def test_equal_conversations_are_kept_once(serve_buffer: ServeBuffer, raw: Redis) -> None:
    """By the tokens that the policy sampled."""
    client = serve_buffer(buffer={"deduplicate": True, "max_rollouts": 100}).with_prompts(1)
    first, same = talk(), talk()
    other = talk()
    changed = other.sequences[0].token_bytes[:-4] + b"\x09\0\0\0"
    sequences = (replace(other.sequences[0], token_bytes=changed), other.sequences[1])
    client.push([encode_rollout(each) for each in (first, same, replace(other, sequences=sequences))])
    assert client.stats().num_rollouts == 2
