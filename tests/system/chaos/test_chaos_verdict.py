"""The verdict finds what it is there to find: every kind of loss that is planted."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from tba.api import LedgerEntry, Stats
from tests.support.buffer import make_payloads
from tests.system.chaos.observer import DIGEST_BYTES, Acked, Observer
from tests.system.chaos.verdict import Verdict, judge_rollouts, judge_steps


def stats(num: int, **changes: object) -> Stats:
    values: dict[str, object] = {"num_rollouts": num, "rollouts_generated": num, "num_pending": 0, "evicted": {}}
    return Stats.model_construct(**{**values, "num_failed": 0, **changes})


@pytest.fixture
def stored() -> dict[bytes, bytes]:
    payloads = make_payloads(["a", "b"], per_prompt=2)
    return {msgspec.msgpack.decode(payload)["rollout_id"]: payload for payload in payloads}


@pytest.fixture
def observer(stored: dict[bytes, bytes]) -> Observer:
    observer = Observer()
    for rollout_id, payload in stored.items():
        observer.rollouts[rollout_id] = hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
    return observer


def test_what_is_as_it_was_told_is_right(stored: dict[bytes, bytes], observer: Observer) -> None:
    verdict = Verdict()
    judge_rollouts(verdict, observer, stored, stats(4))
    judge_steps(verdict, [Acked(0.0, 1, 1, "a")], entries((1, 1, "a"), (1, 2, "b")))
    assert verdict.wrong == []
    assert verdict.counts["lost"] == 0


def test_a_lost_a_changed_and_a_doubled_rollout_are_found(stored: dict[bytes, bytes], observer: Observer) -> None:
    first, second, *_ = stored
    verdict = Verdict()
    left = {key: value for key, value in stored.items() if key != first}
    left[second] += b"?"
    observer.twice_new.append(second.hex())
    judge_rollouts(verdict, observer, left, stats(3))
    assert [sentence.split(",")[0] for sentence in verdict.wrong] == [
        "1 acknowledged rollouts are lost",
        "1 acknowledged rollouts have other bytes",
        "1 rollouts were acknowledged as new twice",
    ]
    assert first.hex() in verdict.wrong[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evicted": {"max_rollouts": 2}}, "2 rollouts were evicted"),
        ({"rollouts_generated": 5}, "the buffer counted 5 new"),
        ({"num_rollouts": 3}, "the index holds 3, Redis 4"),
        ({"num_pending": 1}, "1 rollouts still wait for a score"),
    ],
)
def test_counts_that_disagree_are_found(
    stored: dict[bytes, bytes], observer: Observer, changes: dict[str, object], sentence: str
) -> None:
    verdict = Verdict()
    judge_rollouts(verdict, observer, stored, stats(4, **changes))
    assert len(verdict.wrong) == 1
    assert sentence in verdict.wrong[0]


@pytest.mark.parametrize("lines", [[], [(1, 1, "other")], [(1, 1, "a"), (1, 1, "a")]])
def test_a_step_that_is_missing_replaced_or_doubled_is_found(lines: list[tuple[int, int, str]]) -> None:
    verdict = Verdict()
    judge_steps(verdict, [Acked(0.0, 1, 1, "a")], entries(*lines))
    assert len(verdict.wrong) == 1
    assert "1-1 a" in verdict.wrong[0]


def entries(*lines: tuple[int, int, str]) -> list[LedgerEntry]:
    return [LedgerEntry.model_construct(lineage=lineage, step=step, batch_id=batch) for lineage, step, batch in lines]
