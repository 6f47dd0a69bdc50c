"""The columns of the index: one row per rollout, in the order of the log, in a ring.

Row r lies at slot r % capacity of every column; the rows in use are first .. end - 1. A rollout that is gone keeps its
row (status DEAD) until the rows before it are gone too, or until `compact` closes the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

DEAD = 255
Rows = NDArray[np.int64]
_DTYPES: dict[str, np.dtype] = {
    "position": np.dtype(np.int64),
    "rollout_id": np.dtype("V16"),
    "reward": np.dtype(np.float64),
    "version": np.dtype(np.int32),
    "prompt": np.dtype(np.int32),
    "num_bytes": np.dtype(np.uint32),
    "num_tokens": np.dtype(np.uint32),
    "token_hash": np.dtype(np.uint64),
    "status": np.dtype(np.uint8),
}
"""57 bytes. `version` is the number that versions.py gave the policy version."""

_MIN_CAPACITY = 1024


class Table:
    """Rows first .. end - 1 of every column."""

    def __init__(self) -> None:
        self.capacity = _MIN_CAPACITY
        self.first = 0
        self.end = 0
        self._columns = {name: np.empty(self.capacity, dtype=dtype) for name, dtype in _DTYPES.items()}

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return sum(column.nbytes for column in self._columns.values())

    def slots(self, rows: Rows) -> Rows:
        """Slots [n] of rows [n], for `at`."""
        return rows % self.capacity

    def at(self, name: str, slots: Rows) -> NDArray:
        """Values [n] of a column at slots [n]."""
        return self._columns[name][slots]

    def get(self, name: str, rows: Rows) -> NDArray:
        """Values [n] of a column at rows [n]."""
        return self._columns[name][rows % self.capacity]

    def status(self, rows: Rows) -> NDArray[np.uint8]:
        """Status of rows [n] that may be long gone: the slot of a row before `first` may have another row by now."""
        found = self.get("status", rows)
        found[rows < self.first] = DEAD
        return found

    def put(self, name: str, rows: Rows, values: NDArray | int) -> None:
        """Write a column at rows; of a row named twice the last value stays."""
        self._columns[name][rows % self.capacity] = values

    def pieces(self, name: str, first: int, end: int) -> Iterator[tuple[int, NDArray]]:
        """Rows first .. end - 1 of a column as one or two (first row, contiguous view)."""
        while first < end:
            slot = first % self.capacity
            num = min(end - first, self.capacity - slot)
            yield first, self._columns[name][slot : slot + num]
            first += num

    def scan(self, name: str, first: int, end: int) -> NDArray:
        """Rows first .. end - 1 of a column; a view where they lie together."""
        pieces = [piece for _, piece in self.pieces(name, first, end)]
        if not pieces:
            return self._columns[name][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def has_room(self, num: int) -> bool:
        """Whether `num` more rows fit without `grow`."""
        return self.end + num - self.first <= self.capacity

    def append(self, columns: Mapping[str, NDArray], num: int) -> Rows:
        """Add `num` rows; there must be room. Returns them."""
        slot = self.end % self.capacity
        head = min(num, self.capacity - slot)
        for name, column in self._columns.items():
            values = columns[name]
            column[slot : slot + head] = values[:head]
            if head < num:
                column[: num - head] = values[head:]
        self.end += num
        return np.arange(self.end - num, self.end)

    def grow(self, num: int) -> None:
        """Make room for `num` more rows. Row numbers stay."""
        needed = self.end - self.first + num
        capacity = max(needed, self.capacity * 2 if self.capacity < 2**16 else self.capacity * 5 // 4)
        for name, dtype in _DTYPES.items():
            column = np.empty(capacity, dtype=dtype)
            for first, piece in self.pieces(name, self.first, self.end):
                slot = first % capacity
                head = min(len(piece), capacity - slot)
                column[slot : slot + head] = piece[:head]
                column[: len(piece) - head] = piece[head:]
            self._columns[name] = column
        self.capacity = capacity

    def compact(self, live: Rows, num: int) -> None:
        """Keep only rows `live` (ascending), numbered 0, 1, ... from now on, and make room for `num` more."""
        capacity = max(_MIN_CAPACITY, (len(live) + num) * 5 // 4)
        for name, dtype in _DTYPES.items():
            column = np.empty(capacity, dtype=dtype)
            column[: len(live)] = self.get(name, live)
            self._columns[name] = column
        self.capacity, self.first, self.end = capacity, 0, len(live)

    def skip_dead(self) -> None:
        """Move `first` to the first row that is not dead."""
        while self.first < self.end:
            num = min(4096, self.end - self.first)
            alive = np.flatnonzero(self.scan("status", self.first, self.first + num) != DEAD)
            self.first += int(alive[0]) if len(alive) else num
            if len(alive):
                return

    def row_after(self, position: int) -> int:
        """The first row whose position is greater."""
        for first, piece in self.pieces("position", self.first, self.end):
            if piece[-1] > position:
                return first + int(np.searchsorted(piece, position, side="right"))
        return self.end

    def rows_at(self, positions: NDArray[np.integer]) -> Rows:
        """The row of each position [n], -1 where there is no live one."""
        wanted = positions.astype(np.int64)
        rows = np.full(len(wanted), -1, dtype=np.int64)
        for first, piece in self.pieces("position", self.first, self.end):
            found = np.minimum(np.searchsorted(piece, wanted), len(piece) - 1)
            hit = piece[found] == wanted
            rows[hit] = first + found[hit]
        known = np.flatnonzero(rows >= 0)
        rows[known[self.get("status", rows[known]) == DEAD]] = -1
        return rows

    def where(self, status: int, first: int, *, num: int) -> Rows:
        """The first `num` rows from `first` on that have this status, ascending."""
        return self._first_of(lambda found: found == status, first, num)

    def live(self, first: int, *, num: int) -> Rows:
        """The first `num` rows from `first` on that are not dead, ascending."""
        return self._first_of(lambda found: found != DEAD, first, num)

    def _first_of(self, test: Callable[[NDArray], NDArray[np.bool_]], first: int, num: int) -> Rows:
        rows, step = [np.zeros(0, dtype=np.int64)], max(4096, 2 * num)
        while num > 0 and first < self.end:
            end = min(self.end, first + step)
            rows.append(np.flatnonzero(test(self.scan("status", first, end)))[:num] + first)
            num -= len(rows[-1])
            first, step = end, 2 * step
        return np.concatenate(rows)
