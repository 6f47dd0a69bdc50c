"""Micro-batch plans: complete, within the bound, groups whole where they fit, balanced over the ranks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.learner.forward_backward import MicroBatch, Plan, plan_micro_batches

Rows = list[tuple[int, int]]
ROWS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=60)


def plan_of(rows: Rows, max_tokens: int, *, num_ranks: int = 1, keep_groups: bool = True) -> Plan:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    return plan_micro_batches(lengths, groups, max_tokens, num_ranks=num_ranks, keep_groups=keep_groups)


def load(rows: Rows, micro_batch: MicroBatch) -> int:
    return sum(rows[i][0] for i in micro_batch.indices)


@given(rows=ROWS, max_tokens=st.integers(1, 500), num_ranks=st.integers(1, 5), keep_groups=st.booleans())
def test_every_rollout_is_in_exactly_one_micro_batch_within_the_bound(
    rows: Rows, max_tokens: int, num_ranks: int, keep_groups: bool
) -> None:
    plan = plan_of(rows, max_tokens, num_ranks=num_ranks, keep_groups=keep_groups)
    everything = [micro_batch for micro_batches in plan.rounds for micro_batch in micro_batches]
    assert sorted(i for micro_batch in everything for i in micro_batch.indices) == list(range(len(rows)))
    for micro_batch in everything:
        assert load(rows, micro_batch) <= max_tokens or len(micro_batch.indices) == 1
    assert {len(micro_batches) for micro_batches in plan.rounds} == {num_ranks}
    assert [plan.of_rank(rank) for rank in range(num_ranks)] == [
        [micro_batches[rank] for micro_batches in plan.rounds] for rank in range(num_ranks)
    ]


@given(rows=ROWS, max_tokens=st.integers(1, 500), num_ranks=st.integers(1, 5), keep_groups=st.booleans())
def test_a_micro_batch_knows_whether_its_groups_are_complete(
    rows: Rows, max_tokens: int, num_ranks: int, keep_groups: bool
) -> None:
    plan = plan_of(rows, max_tokens, num_ranks=num_ranks, keep_groups=keep_groups)
    split = []
    for number, micro_batches in enumerate(plan.rounds):
        for micro_batch in micro_batches:
            here = {rows[i][1] for i in micro_batch.indices}
            complete = {i for i, (_, group) in enumerate(rows) if group in here} == set(micro_batch.indices)
            assert micro_batch.whole_groups == complete
        if not all(micro_batch.whole_groups for micro_batch in micro_batches):
            split.append(number)
    assert plan.split_rounds() == split


@given(rows=ROWS, spare_tokens=st.integers(0, 200))
def test_on_one_rank_no_group_is_split_where_all_fit(rows: Rows, spare_tokens: int) -> None:
    """Splitting costs a pass and saves nothing there: the tokens of all micro-batches are the same. Where a group does
    not fit, some are split anyway, and a plan that splits others too may have fewer tokens in such rounds."""
    sizes = Counter[int]()
    for length, group in rows:
        sizes[group] += length
    plan = plan_of(rows, max(sizes.values()) + spare_tokens)
    assert plan.split_rounds() == []


@given(rows=ROWS, max_tokens=st.integers(60, 500), num_ranks=st.integers(1, 5))
def test_loads_differ_by_no_more_than_the_longest_rollout(rows: Rows, max_tokens: int, num_ranks: int) -> None:
    plan = plan_of(rows, max_tokens, num_ranks=num_ranks, keep_groups=False)
    loads = [load(rows, micro_batch) for micro_batches in plan.rounds for micro_batch in micro_batches]
    assert max(loads) - min(loads) <= max(length for length, _ in rows)
    assert loads == sorted(loads, reverse=True)  # ranks with similar loads work at the same time


@given(rows=ROWS, max_tokens=st.integers(60, 500), num_ranks=st.integers(1, 5))
def test_there_are_not_many_more_micro_batches_than_the_tokens_need(
    rows: Rows, max_tokens: int, num_ranks: int
) -> None:
    """With the longest rollout at most half the bound, every bin but those of the last round is at least half full."""
    half = [(max(1, length // 2), group) for length, group in rows]
    plan = plan_of(half, max_tokens, num_ranks=num_ranks, keep_groups=False)
    need = -(-sum(length for length, _ in half) // (max_tokens * num_ranks))
    assert len(plan.rounds) <= 2 * need


def test_a_group_is_split_over_ranks_that_would_otherwise_be_idle() -> None:
    rows = [(10, 0)] * 8
    together = plan_of(rows, 100)
    assert [m.indices for m in together.rounds[0]] == [tuple(range(8))]
    apart = plan_of(rows, 100, num_ranks=4)
    assert [load(rows, m) for m in apart.rounds[0]] == [20] * 4
    assert apart.split_rounds() == [0]


def test_groups_stay_whole_over_ranks_where_that_is_balanced_enough() -> None:
    rows = [(10, group) for group in range(4) for _ in range(8)] + [(1, 4)]
    plan = plan_of(rows, 100, num_ranks=2)
    assert plan.split_rounds() == []
    assert [[load(rows, m) for m in micro_batches] for micro_batches in plan.rounds] == [[81, 80], [80, 80]]


def test_too_few_rollouts_leave_empty_micro_batches() -> None:
    plan = plan_of([(5, 0)], 10, num_ranks=3)
    assert [m.indices for m in plan.rounds[0]] == [(0,), (), ()]
    assert all(m.whole_groups for m in plan.rounds[0])


def test_a_rollout_longer_than_the_bound_goes_alone() -> None:
    plan = plan_of([(50, 0), (3, 1), (2, 2)], 10)
    assert [m.indices for (m,) in plan.rounds] == [(0,), (1, 2)]


def test_micro_batches_are_balanced_by_tokens() -> None:
    plan = plan_of([(8, 0), (2, 1), (7, 2), (3, 3)], 11)
    assert [m.indices for (m,) in plan.rounds] == [(0, 1), (2, 3)]
