"""The bounds and newer rollouts evict the right rollouts, against models."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from tba_buffer.eviction import near_duplicates
from tba_buffer.eviction.near_duplicates import Candidate, NearDuplicateSearch, find_losers, to_codes
from tba_buffer.eviction.policies import MOST_SLACK_ROLLOUTS, SLACK, EvictionPlanner
from tba_buffer.index.log import (
    CHANGE_DTYPE,
    RECORD_DTYPE,
    SCORED,
    STATUS_CODES,
    Evicted,
    Rescored,
    RolloutsAdded,
    pack_record,
)
from tba_buffer.index.rollout_index import Index, IndexSettings, Rows

from tba.config.sections import BufferSection
from tba.versions import START, LineageTree, PolicyVersion
from tests.support import bounds_model
from tests.support.bounds_model import Stored
from tests.support.buffer import make_recipe

TREE = LineageTree({1: START, 2: PolicyVersion(1, 10), 3: PolicyVersion(1, 4)})
REASONS = ("duplicate_tokens", "near_duplicate", "policy_age", "prompt_cap", "max_rollouts", "max_bytes")


def limits(**values: Any) -> BufferSection:
    """Limits that a recipe may be too small for."""
    return BufferSection.model_construct(**{"max_rollouts": 10**9, "max_bytes": 10**15, **values})


class Run:
    """An index, its planner, and the same as a list."""

    def __init__(self, bound_settings: BufferSection) -> None:
        self.settings = bound_settings
        self.index = Index(IndexSettings.of(make_recipe()))
        self.planner = EvictionPlanner(bound_settings)
        self.live: list[Stored] = []

    def add(self, *rollouts: Mapping[str, object]) -> None:
        """Log one push."""
        first = self.index.position + 1
        added = [
            Stored(position=first + at, rollout_id=(first + at).to_bytes(16, "big"), **{"prompt": 0, **values})
            for at, values in enumerate(rollouts)
        ]
        self.live += added
        self.index.apply(RolloutsAdded(first, np.frombuffer(b"".join(map(packed, added)), dtype=RECORD_DTYPE)))

    def rescore(self, rollout: Stored, reward: float, num_bytes: int) -> None:
        """Log one rescoring."""
        change = (rollout.position, reward, num_bytes, STATUS_CODES["scored"])
        self.live[self.live.index(rollout)] = rollout.rescored(reward, num_bytes)
        self.index.apply(Rescored(self.index.position + 1, np.array([change], dtype=CHANGE_DTYPE)))

    def plan(self, now: PolicyVersion | None = START) -> list[tuple[str, Rows]]:
        return self.planner.plan(self.index, TREE, now)

    def enforce(self, now: PolicyVersion | None = START) -> dict[str, list[int]]:
        """Plan, compare with the model, and log what the plan says; positions by reason."""
        plan = self.plan(now)
        gone = {reason: sorted(self.index.column("position", rows).tolist()) for reason, rows in plan}
        expected = bounds_model.plan(self.live, self.settings, TREE, now)
        assert gone == {reason: sorted(r.position for r in rollouts) for reason, rollouts in expected}
        assert [reason for reason, _ in plan] == [reason for reason in REASONS if reason in gone]
        for reason, positions in gone.items():
            self.index.apply(Evicted(self.index.position + 1, np.array(positions, dtype="<u8"), reason))
            self.live = [r for r in self.live if r.position not in positions]
        assert self.plan(now) == []
        return gone


def packed(rollout: Stored) -> bytes:
    fields = vars(rollout).copy()
    del fields["position"]
    return pack_record(fields.pop("rollout_id"), token_hash=fields.pop("tokens"), **fields)


versions = st.sampled_from([START, *(PolicyVersion(lin, step) for lin in (1, 2, 3) for step in (0, 3, 6, 11))])
rollout_values = st.fixed_dictionaries(
    {"prompt": st.integers(0, 3), "num_bytes": st.integers(50, 200), "tokens": st.integers(0, 3), "version": versions}
).flatmap(
    lambda values: st.sampled_from(
        [("scored", -1.0), ("scored", 0.0), ("scored", 2.5), ("pending", None), ("failed", None)]
    ).map(lambda kind: {**values, "status": kind[0], "reward": kind[1]})
)
bound_settings = st.builds(
    BufferSection.model_construct,
    max_rollouts=st.integers(3, 12),
    max_bytes=st.integers(300, 1500),
    max_rollouts_per_prompt=st.none() | st.integers(2, 5),
    max_policy_age_steps=st.none() | st.integers(0, 8),
    deduplicate=st.booleans(),
)
steps = st.one_of(
    st.tuples(st.just("add"), st.lists(rollout_values, min_size=1, max_size=8)),
    st.tuples(st.just("rescore"), st.integers(0, 20)),
    st.tuples(st.just("advance"), versions),
    st.tuples(st.just("forget"), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(chosen=bound_settings, history=st.lists(steps, max_size=15))
def test_every_plan_is_that_of_the_model(chosen: BufferSection, history: list[tuple[str, object]]) -> None:
    run, now = Run(chosen), START
    for name, argument in history:
        match name, argument:
            case "add", list(rollouts):
                run.add(*rollouts)
            case "rescore", int(at) if at < len(run.live):
                run.rescore(run.live[at], reward=1.5, num_bytes=90 + at)
            case "advance", PolicyVersion() as now:
                pass
            case "forget", _:
                run.planner = EvictionPlanner(chosen)
        run.enforce(now)
        assert run.index.num_live == len(run.live)


def test_one_enforcement_of_a_large_cap_serves_many_pushes() -> None:
    cap = 64 * 32
    run = Run(limits(max_rollouts=cap))
    run.add(*({} for _ in range(cap)))
    assert run.plan() == []
    run.add({})
    [(reason, rows)] = run.plan()
    assert (reason, run.index.column("position", rows).tolist()) == ("max_rollouts", [*range(1, 1 + 1 + 32)])


def test_a_very_large_cap_is_undercut_by_few_rollouts_in_the_order_of_arrival() -> None:
    num = MOST_SLACK_ROLLOUTS * SLACK * 2
    records = np.zeros(num, dtype=RECORD_DTYPE)
    records["rollout_id"] = np.arange(2 * num, dtype="<u8").view("V16")
    records["num_bytes"] = 100
    for settings_, reason in (
        (limits(max_rollouts=num - 1), "max_rollouts"),
        (limits(max_bytes=100 * (num - 1)), "max_bytes"),
    ):
        run = Run(settings_)
        run.index.apply(RolloutsAdded(1, records))
        [(found, rows)] = run.plan()
        assert found == reason
        assert run.index.column("position", rows).tolist() == [*range(1, len(rows) + 1)]
        assert MOST_SLACK_ROLLOUTS <= len(rows) <= MOST_SLACK_ROLLOUTS + 2


def test_policy_age_follows_the_active_lineage() -> None:
    run = Run(limits(max_policy_age_steps=5))
    for version in (START, PolicyVersion(1, 3), PolicyVersion(1, 8), PolicyVersion(2, 12)):
        run.add({"version": version})
    assert run.enforce(PolicyVersion(1, 5)) == {}
    assert run.enforce(PolicyVersion(1, 8)) == {"policy_age": [1]}
    # lineage 2 left lineage 1 at step 10, lineage 3 left it at step 4: 1-8 counts from 4 there, and 2-12 too
    assert run.enforce(PolicyVersion(3, 9)) == {"policy_age": [2]}
    assert run.enforce(PolicyVersion(3, 10)) == {"policy_age": [3, 4]}
    run.add({"version": PolicyVersion(3, 10)}, {"version": PolicyVersion(1, 2)})
    assert run.enforce(PolicyVersion(3, 10)) == {"policy_age": [9]}


def test_a_plan_for_which_no_age_is_due_asks_for_no_age() -> None:
    class CountingTree(LineageTree):
        asked = 0

        def policy_age(self, rollout: PolicyVersion, trainer: PolicyVersion) -> int:
            self.asked += 1
            return super().policy_age(rollout, trainer)

    tree, run = CountingTree(TREE.parents), Run(limits(max_policy_age_steps=100))
    run.add(*({"version": PolicyVersion(1, step)} for step in range(50)))
    run.planner.plan(run.index, tree, PolicyVersion(1, 50))
    asked = tree.asked
    for step in range(50, 100):
        assert run.planner.plan(run.index, tree, PolicyVersion(1, step)) == []
    assert tree.asked == asked
    run.add({"version": PolicyVersion(1, 99)})
    run.planner.plan(run.index, tree, PolicyVersion(1, 99))
    assert tree.asked == asked + 1
    [(_, rows)] = run.planner.plan(run.index, tree, PolicyVersion(1, 101))
    assert run.index.column("step", rows).tolist() == [0]


def test_an_unknown_place_of_the_trainer_evicts_nothing_for_its_age() -> None:
    run = Run(limits(max_policy_age_steps=0))
    run.add({"version": START})
    assert run.plan(now=None) == []


def test_equal_tokens_of_other_prompts_and_unhashed_ones_stay() -> None:
    run = Run(limits(deduplicate=True))
    run.add({"tokens": 7}, {"tokens": 7, "prompt": 1}, {"tokens": 0}, {"tokens": 0}, {"tokens": 7})
    assert run.enforce() == {"duplicate_tokens": [1]}
    run.add({"tokens": 7}, {"tokens": 8}, {"tokens": 7, "prompt": 1})
    assert run.enforce() == {"duplicate_tokens": [2, 5]}


def test_a_prompt_with_very_many_rollouts_costs_no_more_per_push() -> None:
    run = Run(limits(deduplicate=True))
    tokens = iter(range(1, 10**9))
    for _ in range(20):
        run.add(*({"tokens": next(tokens)} for _ in range(500)))
        assert run.plan() == []
    sizes = []
    column = run.index.column
    run.index.column = lambda name, rows: (sizes.append(len(rows)), column(name, rows))[1]  # type: ignore[method-assign]
    run.add({"tokens": 123}, {"tokens": next(tokens)})
    [(reason, rows)] = run.plan()
    assert (reason, run.index.column("token_hash", rows).tolist()) == ("duplicate_tokens", [123])
    assert max(sizes) == 2


SHARE = 0.25


def edit_distance(a: str, b: str) -> int:
    """The textbook table, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def is_near(a: Candidate, b: Candidate) -> bool:
    return a.prompt == b.prompt and edit_distance(a.codes, b.codes) < SHARE * (len(a.codes) + len(b.codes))


RESPONSES = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0]), st.text("ab", min_size=1, max_size=9)), max_size=14
)


@given(RESPONSES, st.integers(0, 14))
def test_no_two_that_stay_are_near_and_nothing_goes_without_a_better_one(found, num_first):
    rollouts = [Candidate(n, prompt, reward, codes) for n, (prompt, reward, codes) in enumerate(found)]
    gone = find_losers(rollouts[:num_first], set(), SHARE)
    compared = {rollout.position for rollout in rollouts[:num_first]} - gone
    live = [rollout for rollout in rollouts if rollout.position not in gone]
    gone |= find_losers(live, compared, SHARE)
    kept = [rollout for rollout in rollouts if rollout.position not in gone]
    assert not [(a, b) for a in kept for b in kept if a.position < b.position and is_near(a, b)]
    for loser in rollouts:
        if loser.position in gone:
            better = [r for r in rollouts if (r.reward, -r.position) > (loser.reward, -loser.position)]
            assert any(is_near(loser, other) for other in better)


def test_codes_tell_tokens_apart_and_take_any_id():
    tokens = np.array([0, 5, 0xD800, 0xDFFF, 300_000, 2**31 - 1], dtype=np.int32)
    codes = to_codes(tokens)
    assert len(codes) == len(set(codes)) == 6
    assert to_codes(tokens[:3]) == codes[:3]


class FakeIndex:
    """Scored rollouts, one row each; row n has log position n and prompt n % 10."""

    first, end = 0, 100

    def live_rows(self) -> NDArray[np.int64]:
        return np.arange(self.first, self.end)

    def column(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return {"status": np.full(len(rows), SCORED), "position": rows, "prompt": rows % 10, "reward": rows}[name]

    def rollout_ids(self, rows: NDArray[np.int64]) -> list[bytes]:
        return [b"" for _ in rows]


async def test_a_push_looks_at_the_rollouts_of_its_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def look(live: list[Candidate], compared: set[int], share: float) -> set[int]:
        seen.append({rollout.position for rollout in live})
        return find_losers(live, compared, share)

    monkeypatch.setattr(near_duplicates, "find_losers", look)
    redis = SimpleNamespace(hmget=AsyncMock(side_effect=lambda key, ids: [None for _ in ids]))
    filter_ = NearDuplicateSearch(Mock(redis=redis, spec_set=["redis", "keys"]), SHARE)
    index = FakeIndex()
    for end in (100, 100, 102):
        index.end = end
        assert not len(await filter_.find(cast(Index, index)))
    assert seen == [set(range(100)), {*range(0, 101, 10), *range(1, 102, 10)}]
    assert redis.hmget.await_args.args[1] == [b"", b""]  # the tokens of the others are known
    index.first, index.end = 50, 103
    await filter_.find(cast(Index, index))
    assert filter_._codes.keys() == set(range(50, 103)), "what is evicted is forgotten"


def test_the_filter_is_refused_over_a_buffer_that_is_too_large_for_it():
    assert BufferSection(near_duplicate_share=0.25, max_rollouts=20_000).near_duplicate_share == 0.25
    with pytest.raises(ValidationError, match="set max_rollouts to 20000 or less"):
        BufferSection(near_duplicate_share=0.25)
