"""The sum tree answers as running sums do, whatever happened to it before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.index import priorities
from tba_buffer.index.priorities import SumTree
from tba_buffer.index.tables import PromptSet, csr_indices, group_by

weights_lists = st.lists(st.integers(0, 9), min_size=1, max_size=70)


@given(
    weights_lists,
    st.lists(st.tuples(st.integers(0, 69), st.integers(0, 2**40)), max_size=30),
    st.sampled_from([1, 4, 4096]),
)
def test_find_and_before_agree_with_running_sums(weights: list[int], changes: list[tuple[int, int]], top: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priorities, "_TOP", top)
        tree, model = SumTree(len(weights)), np.zeros(128, dtype=np.int64)
        tree.build(np.array(weights))
        model[: len(weights)] = weights
        for leaf, weight in changes:
            if leaf < tree.capacity:
                tree.set(np.array([leaf]), np.array([weight]))
                model[leaf] = weight
        assert tree.total == model.sum()
        assert [tree.before(leaf) for leaf in range(tree.capacity + 1)] == [
            int(model[:leaf].sum()) for leaf in range(tree.capacity + 1)
        ]
        if tree.total:
            starts = np.cumsum(model) - model
            targets = np.unique(np.concatenate([starts[model > 0], (starts + model - 1)[model > 0]]))
            leaves, rest = tree.find(targets)
            assert leaves.tolist() == (np.searchsorted(np.cumsum(model), targets, side="right")).tolist()
            assert (starts[leaves] + rest).tolist() == targets.tolist()


@given(weights_lists, st.sets(st.integers(0, 69), min_size=1))
def test_many_leaves_set_at_once_are_as_one_after_the_other(weights: list[int], leaves: set[int]) -> None:
    chosen = np.array(sorted(leaf for leaf in leaves if leaf < len(weights)), dtype=np.int64)
    at_once, one_by_one = SumTree(len(weights)), SumTree(len(weights))
    for tree in (at_once, one_by_one):
        tree.build(np.array(weights))
    at_once.set(chosen, chosen + 100)
    for leaf in chosen:
        one_by_one.set(np.array([leaf]), np.array([leaf + 100]))
    assert [at_once.before(leaf) for leaf in range(len(weights))] == [
        one_by_one.before(leaf) for leaf in range(len(weights))
    ]


@given(st.lists(st.dictionaries(st.integers(0, 300), st.booleans(), max_size=20), max_size=20))
def test_a_prompt_set_knows_its_members_by_rank(rounds: list[dict[int, bool]]) -> None:
    prompts, model = PromptSet(), set[int]()
    prompts.grow(301)
    for changes in rounds:
        prompts.put(np.array(list(changes), dtype=np.int64), np.array(list(changes.values()), dtype=bool))
        model = {p for p in model if changes.get(p, True)} | {p for p, joins in changes.items() if joins}
        assert prompts.num == len(model)
        assert prompts.by_rank(np.arange(prompts.num)).tolist() == sorted(model)
    prompts.put_all(np.array([True, False, True]))
    assert prompts.by_rank(np.arange(prompts.num)).tolist() == [0, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_groups_keep_the_order_of_their_items(keys: list[int]) -> None:
    groups = group_by(np.array(keys))
    model = {key: [at for at, other in enumerate(keys) if other == key] for key in sorted(set(keys))}
    assert groups.keys.tolist() == list(model)
    assert groups.sizes.tolist() == [len(items) for items in model.values()]
    assert groups.order.tolist() == [at for items in model.values() for at in items]
    even = np.array([at % 2 == 0 for at in range(len(keys))])
    assert groups.count(even).tolist() == [sum(at % 2 == 0 for at in items) for items in model.values()]


def test_ragged_joins_ranges() -> None:
    assert csr_indices(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert csr_indices(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).tolist() == []
