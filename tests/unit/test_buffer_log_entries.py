"""Entries of the stream as events: pushes that follow each other are one event, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.index.log import CHANGE_DTYPE, RECORD_DTYPE, Publication, RolloutsAdded, parse_entries, parse_entry
from tba_buffer.index.rollout_index import Index, IndexSettings, LogGapError

from tba.versions import PolicyVersion

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
    assert together.fingerprint() == single.fingerprint()


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
