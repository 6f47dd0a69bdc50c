"""Plans of micro-batches: every rollout once, bounds kept, groups whole where they fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.microbatch import plan_micro_batches, plan_rows

LENGTHS_AND_GROUPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=30)


@given(LENGTHS_AND_GROUPS, st.integers(1, 200))
def test_every_rollout_is_planned_once_within_the_bound(rows: list[tuple[int, int]], max_tokens: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    plans = plan_micro_batches(lengths, groups, max_tokens)
    assert sorted(i for plan in plans for i in plan.indices) == list(range(len(rows)))
    for plan in plans:
        padded = len(plan.indices) * max(lengths[i] for i in plan.indices)
        assert padded <= max_tokens or len(plan.indices) == 1


@given(LENGTHS_AND_GROUPS, st.integers(1, 200))
def test_a_group_is_split_only_when_it_does_not_fit(rows: list[tuple[int, int]], max_tokens: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    for plan in plan_micro_batches(lengths, groups, max_tokens):
        for group in {groups[i] for i in plan.indices}:
            members = {i for i, g in enumerate(groups) if g == group}
            whole = members <= set(plan.indices)
            fits = len(members) * max(lengths[i] for i in members) <= max_tokens or len(members) == 1
            assert whole == plan.whole_groups
            assert whole or not fits


def test_rows_of_similar_length_go_together() -> None:
    assert plan_rows([2, 10, 3, 9], max_tokens=20) == [(1, 3), (2, 0)]


def test_a_rollout_longer_than_the_bound_goes_alone() -> None:
    assert plan_rows([50, 3, 2], max_tokens=10) == [(0,), (1, 2)]
