"""Which rollouts a newer one replaces, against a dictionary, over long streams with evictions."""

from __future__ import annotations

import numpy as np
import pytest
from tba_buffer.eviction import policies
from tba_buffer.eviction.policies import NO_ROWS, DuplicateTokens, EvictionPlan
from tba_buffer.index.log import RECORD_DTYPE, Evicted, RolloutsAdded
from tba_buffer.index.rollout_index import Index, IndexSettings, Rows

from tba.versions import START, LineageTree

NUM_PUSHES, PUSH = 300, 20


def replaced_rows(policy: DuplicateTokens, index: Index, new: Rows) -> Rows:
    tree = LineageTree({})
    return policy.choose(EvictionPlan(index, new_rows=new, tree=tree, now=START, near_duplicates=NO_ROWS))


@pytest.mark.parametrize("num_tokens", [3, 200, 10**9])
def test_long_streams_are_those_of_a_dictionary_and_what_is_gone_is_forgotten(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "MERGE_ABOVE", 8)
    monkeypatch.setattr(policies, "GROWTH", 1)
    rng, index, found = np.random.default_rng(num_tokens), Index(IndexSettings()), DuplicateTokens()
    newest: dict[tuple[int, int], int] = {}
    num_replaced = 0
    for _ in range(NUM_PUSHES):
        records = np.zeros(PUSH, dtype=RECORD_DTYPE)
        records["prompt"], records["token_hash"] = rng.integers(0, 3, PUSH), rng.integers(0, num_tokens, PUSH)
        first = index.position + 1
        index.apply(RolloutsAdded(first, records))
        expected = set()
        for at, (prompt, token_hash) in enumerate(zip(records["prompt"], records["token_hash"], strict=True)):
            if token_hash:
                old = newest.get((prompt, token_hash), 0)
                expected |= {old} if old else set()
                newest[(prompt, token_hash)] = first + at
        rows = replaced_rows(found, index, index.live_rows(newest=PUSH))
        replaced = index.column("position", rows).tolist()
        assert set(replaced) == expected
        num_replaced += len(replaced)
        too_many = index.oldest_rows(max(0, index.num_live - len(replaced) - 100))
        gone = np.union1d(np.array(replaced, dtype=np.uint64), index.column("position", too_many))
        index.apply(Evicted(index.position + 1, gone, "test"))
        live = set(index.column("position", index.live_rows()).tolist())
        newest = {key: position for key, position in newest.items() if position in live}
    assert num_replaced > 0 or num_tokens > 1000
    assert len(found._large.keys) <= 3 * 120


def test_the_same_tokens_in_one_push_leave_the_last() -> None:
    index, found = Index(IndexSettings()), DuplicateTokens()
    records = np.zeros(5, dtype=RECORD_DTYPE)
    records["token_hash"] = [7, 7, 0, 0, 7]
    index.apply(RolloutsAdded(1, records))
    assert index.column("position", replaced_rows(found, index, index.live_rows())).tolist() == [1, 2]
