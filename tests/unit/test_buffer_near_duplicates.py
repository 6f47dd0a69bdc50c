"""Near duplicates: no two that stay are near, and whoever goes has a better one near."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from tba_buffer.eviction import near_duplicates
from tba_buffer.eviction.near_duplicates import Candidate, NearDuplicateSearch, find_losers, to_codes
from tba_buffer.index.log import SCORED
from tba_buffer.index.rollout_index import Index

from tba.config.sections import BufferSection

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
