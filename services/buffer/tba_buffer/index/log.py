"""The format of the log. The index is a function of the log alone, since nothing else changes what is stored.

    checkpoint  packed records of everything that was live at one position, written now and then (log_follower.py)
    tail        one Redis stream of the events since

Every rollout, eviction, rescoring, publication, draw, void, and trainer start after a draw takes the next position
(1, 2, 3, ...); the stream id of an entry is `<last position>-0`.

| field | value                                                                       | positions |
|-------|-----------------------------------------------------------------------------|-----------|
| r     | RECORD_DTYPE, one per rollout that a push added                             | one each  |
| e     | uint64 positions of evicted rollouts; the field `w` beside it is the reason | 1         |
| s     | CHANGE_DTYPE, one per rollout whose reward became known or was scored again | 1         |
| m     | "lineage step" of the version that was announced                            | 1         |
| d     | a batch that was drawn, packed as `Drawn.pack` does                         | 1         |
| v     | ids of batches that became void, with spaces between                        | 1         |
| l     | "lineage-step ..." of a trainer's start: the history that it continues      | 1         |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.errors import MalformedError
from tba.versions import PolicyVersion

_RECORD = struct.Struct("<16sdIQIIIQB")
RECORD_DTYPE = np.dtype(
    [
        ("rollout_id", "V16"),
        ("reward", "<f8"),
        ("lineage", "<u4"),
        ("step", "<u8"),
        ("prompt", "<u4"),
        ("num_bytes", "<u4"),
        ("num_tokens", "<u4"),
        ("token_hash", "<u8"),
        ("status", "u1"),
    ]
)
"""57 bytes, little-endian, no padding. `num_tokens` counts sampled tokens; `token_hash` is 0 when nothing asks for
deduplication; an unknown reward is NaN."""

CHECKPOINT_DTYPE = np.dtype([("position", "<u8"), *[(name, RECORD_DTYPE[name]) for name in RECORD_DTYPE.names or ()]])
"""A record of the checkpoint: a live rollout and its position. 65 bytes."""

CHANGE_DTYPE = np.dtype([("position", "<u8"), ("reward", "<f8"), ("num_bytes", "<u4"), ("status", "u1")])
"""A rescored rollout: its position, new reward (NaN: unknown), new payload size, new status."""

SLOT_DTYPE = np.dtype([("prompt", "<u4"), ("is_recent", "u1"), ("turn", "<u4"), ("floor", "<u4")])
"""A slot of a drawn batch: its prompt, its pool, its turn and the floor (index/draws.py). Turn 0: it took no turn."""

STATUS_CODES = {"scored": 0, "pending": 1, "failed": 2}
SCORED, PENDING, FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Publication:
    """The announcement of a version, at its log position."""

    position: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class RolloutsAdded:
    """Records [N] of one push; the first has position `first_position`."""

    first_position: int
    records: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Evicted:
    """The rollouts at `positions` [N] are gone. Positions that are not live are ignored."""

    position: int
    positions: NDArray[np.uint64]
    reason: str


@dataclass(frozen=True, slots=True)
class Rescored:
    """The rollouts named in `changes` [N] (CHANGE_DTYPE) have new rewards. Positions that are not live are ignored."""

    position: int
    changes: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch for step `version` was drawn: slots [S] (SLOT_DTYPE), and the positions [N] of its distinct rollouts."""

    position: int
    batch_id: str
    version: PolicyVersion
    slots: NDArray[np.void]
    positions: NDArray[np.uint64]

    def pack(self) -> bytes:
        """Pack everything but the position in the log."""
        slots, positions = self.slots.tobytes(), self.positions.astype("<u8").tobytes()
        return msgspec.msgpack.encode([self.batch_id, self.version.lineage, self.version.step, slots, positions])

    @classmethod
    def unpack(cls, position: int, data: bytes) -> Drawn:
        """Decode the bytes of `pack`.

        Raises:
            ValueError: `data` was not written by `pack`.
        """
        batch_id, lineage, step, slots, positions = _DRAWN_DECODER.decode(data)
        return cls(
            position,
            batch_id,
            PolicyVersion(lineage, step),
            np.frombuffer(slots, dtype=SLOT_DTYPE),
            np.frombuffer(positions, dtype="<u8"),
        )


_DRAWN_DECODER = msgspec.msgpack.Decoder(tuple[str, int, int, bytes, bytes])


@dataclass(frozen=True, slots=True)
class Voided:
    """These batches are void: nobody trains on them. Unknown ones are ignored."""

    position: int
    batch_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """A trainer started. `history` has the last step of each lineage that it continues; later steps are abandoned."""

    position: int
    history: tuple[PolicyVersion, ...]


class LogGapError(Exception):
    """An entry of the log is missing, differs from the one that was read, or was not written by the buffer."""


Event = RolloutsAdded | Evicted | Rescored | Publication | Drawn | Voided | Resumed


def first_position(event: Event) -> int:
    """Return the first position that an event takes."""
    return event.first_position if isinstance(event, RolloutsAdded) else event.position


@dataclass(frozen=True, slots=True)
class LogCheckpoint:
    """The content of the index at log position `position`: records [N] (CHECKPOINT_DTYPE) in order of position, the
    newest publications, and the draws (`DrawHistory.pack`; b"": none)."""

    position: int
    publications: tuple[Publication, ...]
    records: NDArray[np.void]
    draws: bytes = b""


def pack_record(
    rollout_id: bytes,
    *,
    reward: float | None,
    version: PolicyVersion,
    prompt: int,
    num_bytes: int,
    num_tokens: int,
    token_hash: int,
    status: str,
) -> bytes:
    """Pack the record of one rollout."""
    return _RECORD.pack(
        rollout_id,
        float("nan") if reward is None else reward,
        version.lineage,
        version.step,
        prompt,
        num_bytes,
        num_tokens,
        token_hash,
        STATUS_CODES[status],
    )


def parse_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> Event:
    """Parse one stream entry.

    Raises:
        LogGapError: no script of the buffer wrote this entry.
    """
    try:
        position = int(entry_id.split(b"-")[0])
        # one letter names the kind of an entry: records, evicted, scored, drawn, void, lineage, mark (a publication)
        if (records := fields.get(b"r")) is not None:
            parsed = np.frombuffer(records, dtype=RECORD_DTYPE)
            # the id of the entry is the position of its last record
            return RolloutsAdded(position - len(parsed) + 1, parsed)
        if (gone := fields.get(b"e")) is not None:
            return Evicted(position, np.frombuffer(gone, dtype="<u8"), fields[b"w"].decode())
        if (changes := fields.get(b"s")) is not None:
            return Rescored(position, np.frombuffer(changes, dtype=CHANGE_DTYPE))
        if (drawn := fields.get(b"d")) is not None:
            return Drawn.unpack(position, drawn)
        if (void := fields.get(b"v")) is not None:
            return Voided(position, tuple(void.decode().split()))
        if (history := fields.get(b"l")) is not None:
            return Resumed(position, tuple(map(PolicyVersion.parse, history.decode().split())))
        return Publication(position, PolicyVersion(*map(int, fields[b"m"].split())))
    except (KeyError, TypeError, ValueError, MalformedError) as error:
        raise LogGapError(f"entry {entry_id.decode()} is not an entry of the log") from error


def parse_entries(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[Event]:
    """Parse stream entries; consecutive pushes become one event.

    Raises:
        LogGapError: no script of the buffer wrote one of these entries.
    """
    events: list[Event] = []
    joined: list[bytes] = []
    end = 0

    # many small pushes become one event, because additions are applied as one vector operation
    def join() -> None:
        if joined:
            records = np.frombuffer(b"".join(joined), dtype=RECORD_DTYPE)
            events.append(RolloutsAdded(end - len(records) + 1, records))
            joined.clear()

    for entry_id, fields in entries:
        records = fields.get(b"r")
        # no push, or a damaged one, which parse_entry refuses
        if records is None or len(records) % RECORD_DTYPE.itemsize:
            join()
            events.append(parse_entry(entry_id, fields))
            continue
        position = int(entry_id.split(b"-")[0])
        if position != end + len(records) // RECORD_DTYPE.itemsize:  # a gap: joined, it would not show
            join()
        joined.append(records)
        end = position
    join()
    return events
