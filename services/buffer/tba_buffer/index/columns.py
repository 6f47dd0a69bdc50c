"""The columns of the index: one row per rollout, in the order of the log, in a ring.

Row r lies at slot r % capacity of every column; the rows in use are first .. end - 1. A rollout that is gone keeps its
row (status DEAD) until the rows before it are gone too, or until `compact` closes the gaps.

The column `version` holds a small number for each policy version, so that a row needs 4 bytes for it
(`VersionNumbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tba.versions import PolicyVersion

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
"""57 bytes."""

_MIN_CAPACITY = 1024


class Columns:
    """A ring of columns; rows first .. end - 1 are in use."""

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
        """Return the slots [n] of rows [n], for `at`."""
        return rows % self.capacity

    def at(self, name: str, slots: Rows) -> NDArray:
        """Return the values [n] of a column at slots [n]."""
        return self._columns[name][slots]

    def get(self, name: str, rows: Rows) -> NDArray:
        """Return the values [n] of a column at rows [n]."""
        return self._columns[name][rows % self.capacity]

    def status(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the status of rows [n], which may be long gone."""
        found = self.get("status", rows)
        # the slot of a row before `first` may hold another row by now
        found[rows < self.first] = DEAD
        return found

    def put(self, name: str, rows: Rows, values: NDArray | int) -> None:
        """Write a column at rows. A row that is named twice keeps its last value."""
        self._columns[name][rows % self.capacity] = values

    def pieces(self, name: str, first: int, end: int) -> Iterator[tuple[int, NDArray]]:
        """Yield rows first .. end - 1 of a column as one or two (first row, contiguous view)."""
        while first < end:
            slot = first % self.capacity
            num = min(end - first, self.capacity - slot)
            yield first, self._columns[name][slot : slot + num]
            first += num

    def scan(self, name: str, first: int, end: int) -> NDArray:
        """Return rows first .. end - 1 of a column; a view where they lie together."""
        pieces = [piece for _, piece in self.pieces(name, first, end)]
        if not pieces:
            return self._columns[name][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def has_room(self, num: int) -> bool:
        """Return whether `num` more rows fit without `grow`."""
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
            # row numbers stay, so each piece goes to its slot in the larger ring, perhaps around its end
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
        """Return the first row with a greater position."""
        for first, piece in self.pieces("position", self.first, self.end):
            if piece[-1] > position:
                return first + int(np.searchsorted(piece, position, side="right"))
        return self.end

    def rows_at(self, positions: NDArray[np.integer]) -> Rows:
        """Return the row of each position [n], -1 where there is no live one."""
        wanted = positions.astype(np.int64)
        rows = np.full(len(wanted), -1, dtype=np.int64)
        for first, piece in self.pieces("position", self.first, self.end):
            found = np.minimum(np.searchsorted(piece, wanted), len(piece) - 1)
            hit = piece[found] == wanted
            rows[hit] = first + found[hit]
        # a dead row keeps its position until the ring is compacted
        known = np.flatnonzero(rows >= 0)
        rows[known[self.get("status", rows[known]) == DEAD]] = -1
        return rows

    def where(self, status: int, first: int, *, num: int) -> Rows:
        """Return the first `num` rows from `first` on with this status, ascending."""
        return self._first_of(lambda found: found == status, first, num)

    def live(self, first: int, *, num: int) -> Rows:
        """Return the first `num` live rows from `first` on, ascending."""
        return self._first_of(lambda found: found != DEAD, first, num)

    def _first_of(self, test: Callable[[NDArray], NDArray[np.bool_]], first: int, num: int) -> Rows:
        rows, step = [np.zeros(0, dtype=np.int64)], max(4096, 2 * num)
        while num > 0 and first < self.end:
            end = min(self.end, first + step)
            rows.append(np.flatnonzero(test(self.scan("status", first, end)))[:num] + first)
            num -= len(rows[-1])
            first, step = end, 2 * step
        return np.concatenate(rows)


class VersionNumbers:
    """A small number for each policy version with a live rollout. Other numbers are given out again."""

    def __init__(self) -> None:
        self._numbers: dict[PolicyVersion, int] = {}
        self._free: list[int] = []
        self._recent: set[PolicyVersion] | None = None
        self.lineages = np.zeros(16, dtype=np.uint32)
        self.steps = np.zeros(16, dtype=np.uint64)
        self.counts = np.zeros(16, dtype=np.int64)
        self.recent = np.ones(16, dtype=bool)
        """[V] by number: lineage, step, live rollouts, and whether it is recent."""

    def number_of(self, lineages: NDArray[np.uint32], steps: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the number of each version (lineages [n], steps [n]); unknown ones get one. [n]"""
        # one version, as in most pushes: without the two sorts below
        if (lineages == lineages[0]).all() and (steps == steps[0]).all():
            return np.full(len(steps), self._number(int(lineages[0]), int(steps[0])), dtype=np.int32)
        distinct, by_step = np.unique(steps, return_inverse=True)
        keys = lineages.astype(np.uint64) * np.uint64(len(distinct)) + by_step.astype(np.uint64)
        _, at, inverse = np.unique(keys, return_index=True, return_inverse=True)
        numbers = [self._number(int(lineages[i]), int(steps[i])) for i in at]
        return np.array(numbers, dtype=np.int32)[inverse]

    def _number(self, lineage: int, step: int) -> int:
        version = PolicyVersion(lineage, step)
        number = self._numbers.get(version)
        if number is None:
            # numbers are reused, so that the arrays grow with the live versions and not with all that ever were
            number = self._free.pop() if self._free else len(self._numbers)
            if number >= len(self.counts):
                for name in ("lineages", "steps", "counts", "recent"):
                    column = getattr(self, name)
                    setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self._numbers[version] = number
            self.lineages[number], self.steps[number] = lineage, step
            self.recent[number] = self._recent is None or version in self._recent
        return number

    def count(self, numbers: NDArray[np.int32], sign: int) -> None:
        """Count rollouts of these versions in (+1) or out (-1)."""
        np.add.at(self.counts, numbers, sign)
        if sign < 0:
            for number in np.unique(numbers[self.counts[numbers] == 0]).tolist():
                del self._numbers[PolicyVersion(int(self.lineages[number]), int(self.steps[number]))]
                self._free.append(number)

    def live(self) -> dict[PolicyVersion, int]:
        """Return the live rollouts per version, versions ascending."""
        return {version: int(self.counts[number]) for version, number in sorted(self._numbers.items())}

    def set_recent(self, versions: set[PolicyVersion] | None) -> None:
        """Set which versions are recent from now on; None: all."""
        self._recent = versions
        self.recent[:] = versions is None
        for version in versions or ():
            if (number := self._numbers.get(version)) is not None:
                self.recent[number] = True
