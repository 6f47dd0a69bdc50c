"""Entries of the log come back as what was written, one by one and together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.index.log import (
    CHANGE_DTYPE,
    CHECKPOINT_DTYPE,
    RECORD_DTYPE,
    Evicted,
    Publication,
    Rescored,
    RolloutsAdded,
    pack_record,
    parse_entries,
    parse_entry,
)
from tba_buffer.index.rollout_index import Index, IndexSettings, LogGapError

from tba.versions import PolicyVersion
from tests.support.index_values import fingerprint


def pack(reward: float | None, status: str) -> bytes:
    fields: dict[str, int] = {"prompt": 9, "num_bytes": 123, "num_tokens": 7, "token_hash": 2**64 - 1}
    version = PolicyVersion(3, 10**11)
    return pack_record(b"0123456789abcdef", reward=reward, version=version, status=status, **fields)


def test_the_records_have_the_sizes_that_scripts_rely_on() -> None:
    assert (RECORD_DTYPE.itemsize, CHECKPOINT_DTYPE.itemsize, CHANGE_DTYPE.itemsize) == (57, 65, 21)
    assert len(pack(1.0, "scored")) == RECORD_DTYPE.itemsize


def test_a_record_comes_back_as_it_was_packed() -> None:
    event = parse_entry(b"8-0", {b"r": pack(-2.5, "scored") + pack(None, "pending")})
    assert isinstance(event, RolloutsAdded)
    assert event.first_position == 7
    scored, pending = event.records
    assert scored["rollout_id"].tobytes() == b"0123456789abcdef"
    assert (scored["reward"], scored["lineage"], scored["step"]) == (-2.5, 3, 10**11)
    assert (scored["prompt"], scored["num_bytes"], scored["num_tokens"]) == (9, 123, 7)
    assert (scored["token_hash"], scored["status"]) == (2**64 - 1, 0)
    assert math.isnan(pending["reward"])
    assert pending["status"] == 1


def test_evictions_changes_and_marks_come_back() -> None:
    evicted = parse_entry(b"9-0", {b"e": np.array([3, 5], dtype="<u8").tobytes(), b"w": b"max_bytes"})
    assert isinstance(evicted, Evicted)
    assert (evicted.position, evicted.positions.tolist(), evicted.reason) == (9, [3, 5], "max_bytes")
    changes = np.array([(3, 0.5, 77, 0)], dtype=CHANGE_DTYPE)
    rescored = parse_entry(b"10-0", {b"s": changes.tobytes()})
    assert isinstance(rescored, Rescored)
    assert (rescored.position, rescored.changes.tolist()) == (10, [(3, 0.5, 77, 0)])
    assert parse_entry(b"11-0", {b"m": b"2 40"}) == Publication(11, PolicyVersion(2, 40))


Entry = tuple[bytes, dict[bytes, bytes]]


def build(kinds: list[tuple[str, int]]) -> list[Entry]:
    """A log of pushes of `number` rollouts, evictions and rescorings of what is `number` positions back, and marks."""
    entries: list[Entry] = []
    position = 0
    for kind, number in kinds:
        back = max(0, position + 1 - number)
        position += number if kind == "r" else 1
        records = np.zeros(number, dtype=RECORD_DTYPE)
        records["num_bytes"] = position
        fields = {
            "r": {b"r": records.tobytes()},
            "e": {b"e": np.array([back], dtype="<u8").tobytes(), b"w": b"max_rollouts"},
            "s": {b"s": np.array([(back, 2.5, 7, 0)], dtype=CHANGE_DTYPE).tobytes()},
            "m": {b"m": b"1 %d" % number},
        }[kind]
        entries.append((b"%d-0" % position, fields))
    return entries


@given(kinds=st.lists(st.tuples(st.sampled_from(["r", "r", "r", "e", "s", "m"]), st.integers(1, 9)), max_size=20))
def test_entries_together_are_what_they_are_one_by_one(kinds: list[tuple[str, int]]) -> None:
    entries, together, single = build(kinds), Index(IndexSettings()), Index(IndexSettings())
    together.apply_many(parse_entries(entries))
    for entry in entries:
        single.apply(parse_entry(*entry))
    assert fingerprint(together) == fingerprint(single)


def test_pushes_that_follow_each_other_are_one_event() -> None:
    first, publication, last = parse_entries(build([("r", 2), ("r", 3), ("m", 4), ("r", 1), ("r", 1)]))
    assert isinstance(first, RolloutsAdded)
    assert isinstance(last, RolloutsAdded)
    assert (first.first_position, first.records["num_bytes"].tolist()) == (1, [2, 2, 5, 5, 5])
    assert publication == Publication(6, PolicyVersion(1, 4))
    assert (last.first_position, len(last.records)) == (7, 2)


def test_a_hole_between_two_pushes_stays_a_hole() -> None:
    entries = build([("r", 2), ("r", 3), ("r", 4)])
    del entries[1]
    events = parse_entries(entries)
    assert [event.first_position for event in events if isinstance(event, RolloutsAdded)] == [1, 6]
    with pytest.raises(LogGapError, match="continues at 6, the view ends at 2"):
        Index(IndexSettings()).apply_many(events)
