"""The log: one Redis stream of events that the index is a function of.

Every rollout, eviction and mark takes the next position (1, 2, 3, ...); an entry's stream id is `<last position>-0`.

| field | value                                                              | positions |
|-------|--------------------------------------------------------------------|-----------|
| r     | packed records, one per rollout that a push added                  | one each  |
| e     | "first surviving position|reason|marks", marks as in the next line | 1         |
| m     | "lineage step" of the version that was announced                   | 1         |

Eviction removes the oldest, so an entry before the first surviving position is cut off the stream; the eviction event
repeats the newest marks, because theirs may be among the entries that are cut off.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.versions import PolicyVersion
from tba.wire import Rollout

_RECORD = struct.Struct("<16sdIQIIB")
RECORD_DTYPE = np.dtype(
    [
        ("rollout_id", "V16"),
        ("reward", "<f8"),
        ("lineage", "<u4"),
        ("step", "<u8"),
        ("prompt", "<u4"),
        ("num_bytes", "<u4"),
        ("status", "u1"),
    ]
)
"""45 bytes, little-endian, no padding. push.lua reads num_bytes and status."""

STATUS_CODES = {"scored": 0, "pending": 1, "failed": 2}
SCORED = STATUS_CODES["scored"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A sync mark: where it stands and the version it announced."""

    position: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class RolloutsAdded:
    """Records [N] of one push; the first has position `first_position`."""

    first_position: int
    records: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Rollouts before `first_live` are gone; `marks` are the newest marks at that moment, oldest first."""

    position: int
    first_live: int
    reason: str
    marks: tuple[Mark, ...]


Event = RolloutsAdded | Evicted | Mark


def pack_record(rollout: Rollout, *, prompt_number: int, num_bytes: int) -> bytes:
    """The record of one rollout; an unknown reward is NaN and its status says why."""
    version = rollout.version
    reward = float("nan") if rollout.reward is None else rollout.reward
    status = STATUS_CODES[rollout.reward_status]
    return _RECORD.pack(rollout.rollout_id, reward, version.lineage, version.step, prompt_number, num_bytes, status)


def parse_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> Event:
    """One stream entry as an event."""
    position = int(entry_id.split(b"-")[0])
    (kind, value), *_ = fields.items()
    if kind == b"r":
        records = np.frombuffer(value, dtype=RECORD_DTYPE)
        return RolloutsAdded(position - len(records) + 1, records)
    if kind == b"m":
        return Mark(position, PolicyVersion(*map(int, value.split())))
    first_live, reason, marks = value.decode().split("|")
    return Evicted(position, int(first_live), reason, tuple(_mark(text) for text in marks.split(";") if text))


def _mark(text: str) -> Mark:
    position, lineage, step = map(int, text.split())
    return Mark(position, PolicyVersion(lineage, step))
