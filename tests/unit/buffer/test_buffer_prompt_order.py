"""The orders of prompts over an index, compared with sorting everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.rollouts.prompt_queries import by_version, ordered

from tba.api import PromptOrder
from tba.versions import PolicyVersion
from tests.support.index_values import Item, make_added, make_evicted, make_index

NUM_PROMPTS = 8
"""The index meets at most those below 6: prompts without a rollout are common."""
items = st.lists(
    st.builds(
        Item,
        prompt=st.integers(0, 5),
        reward=st.sampled_from([-2.0, 0.0, 0.5, 1.0]),
        status=st.sampled_from(["scored", "scored", "pending", "failed"]),
        version=st.builds(PolicyVersion, st.integers(0, 2), st.integers(0, 2)),
    ),
    min_size=1,
    max_size=40,
)


def expected(live: Sequence[Item], numbers: Sequence[int], order: PromptOrder) -> list[int]:
    def mean(number: int) -> float:
        rewards = [item.reward for item in live if item.prompt == number and item.status == "scored"]
        return sum(rewards) / len(rewards) if rewards else math.nan

    def key(number: int) -> tuple[float, float]:
        match order:
            case "upload":
                return (0.0, 0.0)
            case "most":
                return (-sum(item.prompt == number for item in live), 0.0)
        value = -mean(number) if order == "best" else mean(number)
        return (1.0, 0.0) if math.isnan(value) else (0.0, value)

    return sorted(numbers, key=key)


@given(rollouts=items, order=st.sampled_from(["upload", "best", "worst", "most"]), data=st.data())
def test_prompts_are_in_the_order_of_sorting_all(rollouts: list[Item], order: PromptOrder, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(1, len(rollouts))), label="gone")
    numbers = sorted(data.draw(st.sets(st.integers(0, NUM_PROMPTS - 1)), label="prompts that match"))
    index = make_index(make_added(1, rollouts), make_evicted(len(rollouts) + 1, sorted(gone)))
    live = [item for position, item in enumerate(rollouts, 1) if position not in gone]
    found = ordered(index, np.array(numbers, dtype=np.int64), order)
    assert found.tolist() == expected(live, numbers, order)


@given(rollouts=items)
def test_versions_of_a_prompt_count_its_rollouts(rollouts: list[Item]) -> None:
    index = make_index(make_added(1, rollouts))
    for number in range(NUM_PROMPTS):
        own = [item for item in rollouts if item.prompt == number]
        versions = sorted({item.version for item in own})
        found = by_version(index, number)
        assert [each.version for each in found] == [str(version) for version in versions]
        for each, version in zip(found, versions, strict=True):
            rewards = [item.reward for item in own if item.version == version and item.status == "scored"]
            assert each.num_rollouts == sum(item.version == version for item in own)
            assert each.num_scored == len(rewards)
            assert each.reward_mean == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)
