"""Entries of the log come back as what was written."""

from __future__ import annotations

import math

import numpy as np
from tba_buffer.index.log import (
    CHANGE_DTYPE,
    CHECKPOINT_DTYPE,
    RECORD_DTYPE,
    Evicted,
    Publication,
    Rescored,
    RolloutsAdded,
    pack_record,
    parse_entry,
)

from tba.versions import PolicyVersion


def pack(reward: float | None, status: str) -> bytes:
    return pack_record(
        b"0123456789abcdef",
        reward=reward,
        version=PolicyVersion(3, 10**11),
        prompt=9,
        num_bytes=123,
        num_tokens=7,
        token_hash=2**64 - 1,
        status=status,
    )


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
