"""The tables of the index: one row per rollout, the rows of each prompt, and the set of prompts that can be drawn.

Columns     one row per rollout, in the order of the log, in a ring. Row r lies at place r % capacity of every column,
            and the rows in use are first .. end - 1. A rollout that is gone keeps its row (status DEAD) until the rows
            before it are gone too, or until `compact` closes the gaps. The column `version` holds a small number for
            each policy version, so that a row needs 4 bytes for it (VersionNumbers).
PromptRows  the rows of each prompt, ascending, in one arena: a block of power-of-two size per prompt. Rows of every
            status lie in a block. Dead rows stay until the block is rewritten: when it is full, when more than half of
            its rows are dead, and when all are.
PromptSet   answers "which member has the r-th smallest number?" quickly, whatever the order the members came in.

Groups of different sizes are stored in one vector: items sorted by key (`group_by`), or many ranges one after the other
(`csr_indices`, after the compressed sparse row format).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.versions import PolicyVersion

Rows = NDArray[np.int64]
Prompts = NDArray[np.int64]
DEAD = 255
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
    "uses": np.dtype(np.uint16),
}
"""59 bytes per row. `uses` counts the batches that a rollout was in, up to the largest number that fits."""
_MIN_CAPACITY = 1024
_MIN_SIZE = 4
"""Smallest size of a prompt's block, in rows."""
_LONG = 256
_CHUNK = 64


class Columns:
    """A ring of columns; rows first .. end - 1 are in use."""

    def __init__(self) -> None:
        self.capacity = _MIN_CAPACITY
        self.first = 0
        self.end = 0
        self._columns = {name: np.empty(self.capacity, dtype=dtype) for name, dtype in _DTYPES.items()}

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return sum(column.nbytes for column in self._columns.values())

    def slots(self, rows: Rows) -> Rows:
        """Return the places [n] of rows [n] in the arrays of the ring, for `at`."""
        return rows % self.capacity

    def at(self, name: str, slots: Rows) -> NDArray:
        """Return the values [n] of a column at the places that `slots` returned [n]."""
        return self._columns[name][slots]

    def get(self, name: str, rows: Rows) -> NDArray:
        """Return the values [n] of a column at rows [n]."""
        return self._columns[name][rows % self.capacity]

    def status(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the status of rows [n]; rows before `first`, which are gone, have the status DEAD."""
        found = self.get("status", rows)
        # the slot of a row before `first` may hold another row by now
        found[rows < self.first] = DEAD
        return found

    def put(self, name: str, rows: Rows, values: NDArray | int) -> None:
        """Write values [n] of a column at rows [n]. A row that occurs twice keeps its last value."""
        self._columns[name][rows % self.capacity] = values

    def pieces(self, name: str, first: int, end: int) -> Iterator[tuple[int, NDArray]]:
        """Yield rows first .. end - 1 of a column as one or two pairs (first row, contiguous view)."""
        while first < end:
            slot = first % self.capacity
            num = min(end - first, self.capacity - slot)
            yield first, self._columns[name][slot : slot + num]
            first += num

    def scan(self, name: str, first: int, end: int) -> NDArray:
        """Return rows first .. end - 1 of a column: a view if they are contiguous in the ring, else a copy."""
        pieces = [piece for _, piece in self.pieces(name, first, end)]
        if not pieces:
            return self._columns[name][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def append(self, columns: Mapping[str, NDArray], num: int) -> Rows:
        """Append `num` rows and return their row numbers. The capacity must suffice (`grow`)."""
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
        """Enlarge the ring, so that `num` more rows fit. Row numbers stay."""
        needed = self.end - self.first + num
        # from 65,536 rows on by a quarter: twice the memory of a large index may not be there
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
        """Keep only rows `live` (ascending), renumber them 0, 1, ..., and resize the ring to fit `num` more rows."""
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
        """Return the first row with a log position above `position`; `end` if there is none."""
        for first, piece in self.pieces("position", self.first, self.end):
            if piece[-1] > position:
                return first + int(np.searchsorted(piece, position, side="right"))
        return self.end

    def rows_at(self, positions: NDArray[np.integer]) -> Rows:
        """Return the row of each log position [n], -1 where no live row has it."""
        wanted = positions.astype(np.int64)
        rows = np.full(len(wanted), -1, dtype=np.int64)
        for first, piece in self.pieces("position", self.first, self.end):
            # positions ascend along the ring; one beyond the last is compared with the last, and is no hit
            found = np.minimum(np.searchsorted(piece, wanted), len(piece) - 1)
            hit = piece[found] == wanted
            rows[hit] = first + found[hit]
        # a dead row keeps its position until the ring is compacted
        known = np.flatnonzero(rows >= 0)
        rows[known[self.get("status", rows[known]) == DEAD]] = -1
        return rows

    def live(self, first: int, *, num: int, status: int | None = None) -> Rows:
        """Return the first `num` live rows from `first` on, ascending; only those with this status, if given."""
        rows, step = [np.zeros(0, dtype=np.int64)], max(4096, 2 * num)
        while num > 0 and first < self.end:
            end = min(self.end, first + step)
            found = self.scan("status", first, end)
            rows.append(np.flatnonzero(found != DEAD if status is None else found == status)[:num] + first)
            num -= len(rows[-1])
            first, step = end, 2 * step
        return np.concatenate(rows)


class VersionNumbers:
    """Assigns a small number to each policy version with a live rollout. Numbers of other versions are reused."""

    def __init__(self) -> None:
        self._numbers: dict[PolicyVersion, int] = {}
        self._free: list[int] = []
        self.lineages = np.zeros(16, dtype=np.uint32)
        self.steps = np.zeros(16, dtype=np.uint64)
        self.counts = np.zeros(16, dtype=np.int64)
        """The lineage, the step and the number of live rollouts of each version, by its number. Each [V]."""

    def number_of(self, lineages: NDArray[np.uint32], steps: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the number of each version (lineages [n], steps [n]). A version without a number gets one. [n]"""
        if (lineages == lineages[0]).all() and (steps == steps[0]).all():
            # one version, as in most pushes: without the two sorts below
            at, inverse = [0], np.zeros(len(steps), dtype=np.int64)
        else:
            distinct, by_step = np.unique(steps, return_inverse=True)
            keys = lineages.astype(np.uint64) * np.uint64(len(distinct)) + by_step.astype(np.uint64)
            _, at, inverse = np.unique(keys, return_index=True, return_inverse=True)
        numbers = []
        for version in [PolicyVersion(int(lineages[i]), int(steps[i])) for i in at]:
            if version not in self._numbers:
                # numbers are reused, so that the arrays grow with the live versions and not with all that ever were
                number = self._free.pop() if self._free else len(self._numbers)
                if number >= len(self.counts):
                    for name in ("lineages", "steps", "counts"):
                        column = getattr(self, name)
                        setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
                self._numbers[version] = number
                self.lineages[number], self.steps[number] = version.lineage, version.step
            numbers.append(self._numbers[version])
        return np.array(numbers, dtype=np.int32)[inverse]

    def count(self, numbers: NDArray[np.int32], sign: int) -> None:
        """Count rollouts of these versions in (+1) or out (-1)."""
        # not `+=`: a number that occurs several times counts as often
        np.add.at(self.counts, numbers, sign)
        if sign < 0:
            for number in np.unique(numbers[self.counts[numbers] == 0]).tolist():
                del self._numbers[PolicyVersion(int(self.lineages[number]), int(self.steps[number]))]
                self._free.append(number)

    def live(self) -> dict[PolicyVersion, int]:
        """Return the number of live rollouts per version, versions ascending."""
        return {version: int(self.counts[number]) for version, number in sorted(self._numbers.items())}


class PromptRows:
    """The rows of each prompt, in one block of the arena per prompt. Blocks have a start, a length and a size [P].

    Args:
        is_live: returns which of rows [n] are live, [n] bool.
    """

    def __init__(self, is_live: Callable[[Rows], NDArray[np.bool_]]) -> None:
        self._is_live = is_live
        self._arena = np.empty(1024, dtype=np.int64)
        self._used = 0
        self._num_free = 0
        self._free: dict[int, list[int]] = {}
        self.starts = np.zeros(0, dtype=np.int64)
        self.lengths = np.zeros(0, dtype=np.int32)
        self._sizes = np.zeros(0, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        arrays = (self._arena, self.starts, self.lengths, self._sizes)
        return sum(array.nbytes for array in arrays) + 8 * sum(map(len, self._free.values()))

    def grow(self, num_prompts: int) -> None:
        """Extend the arrays to all prompt numbers below `num_prompts`."""
        if (more := num_prompts - len(self.starts)) > 0:
            self.starts = np.concatenate([self.starts, np.zeros(more, dtype=np.int64)])
            self.lengths = np.concatenate([self.lengths, np.zeros(more, dtype=np.int32)])
            self._sizes = np.concatenate([self._sizes, np.zeros(more, dtype=np.int32)])

    def rows(self, prompt: int) -> Rows:
        """Return the rows in the block of one prompt, dead ones too (a view: read only)."""
        start = int(self.starts[prompt])
        return self._arena[start : start + int(self.lengths[prompt])]

    def rows_of(self, prompts: Prompts) -> tuple[Rows, NDArray[np.int32]]:
        """Return the rows of prompts [k], block after block, dead ones too; and the number of rows of each [k]."""
        lengths = self.lengths[prompts]
        return self._arena[csr_indices(self.starts[prompts], lengths)], lengths

    def rows_from(self, prompts: Prompts, skip: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
        """Return the same as `rows_of`, without the first `skip` [k] rows of each block."""
        lengths = self.lengths[prompts] - skip
        return self._arena[csr_indices(self.starts[prompts] + skip, lengths)], lengths

    def append(self, by_prompt: Groups, rows: Rows) -> Prompts:
        """Add rows [n] (ascending, newer than all before) to their prompts; return the prompts whose block moved."""
        prompts, num_new = by_prompt.keys, by_prompt.sizes
        length = self.lengths[prompts]
        full = length + num_new > self._sizes[prompts]
        moved = prompts[full]
        if len(moved):
            self._rewrite(moved, num_new[full])
            length = self.lengths[prompts]
        at = self.starts[prompts] + length - by_prompt.firsts
        self._arena[np.repeat(at, num_new) + np.arange(len(rows))] = rows[by_prompt.order]
        self.lengths[prompts] = length + num_new
        return moved

    def trim(self, prompts: Prompts, live: NDArray[np.int64]) -> Prompts:
        """Rewrite the blocks of prompts [k] that are mostly dead, with `live` [k] live rows; return those prompts."""
        length = self.lengths[prompts]
        # a block is rewritten once most of it is dead, so the cost is shared by the rows that died
        moved = prompts[(length > 2 * live + 8) | ((live == 0) & (length > 0))]
        if len(moved):
            self._rewrite(moved, np.zeros(len(moved), dtype=np.int64))
        return moved

    def _rewrite(self, prompts: Prompts, num_new: NDArray[np.integer]) -> None:
        """Write new blocks without the dead rows, with free places for `num_new` [k] more rows each."""
        rows, lengths = self.rows_of(prompts)
        alive = self._is_live(rows)
        owner = np.repeat(np.arange(len(prompts)), lengths)[alive]
        rows, lengths = rows[alive], np.bincount(owner, minlength=len(prompts))
        # release the old blocks
        for start, size in zip(self.starts[prompts].tolist(), self._sizes[prompts].tolist(), strict=True):
            if size:
                self._free.setdefault(size, []).append(start)
                self._num_free += size
        self._sizes[prompts] = self.lengths[prompts] = 0
        self._allocate(prompts, lengths + num_new)
        self.lengths[prompts] = lengths
        self._arena[csr_indices(self.starts[prompts], lengths)] = rows

    def _allocate(self, prompts: Prompts, needed: NDArray[np.integer]) -> None:
        prompts, needed = prompts[needed > 0], needed[needed > 0]
        # a long block gets a quarter more than it needs, else one of steady length would be rewritten all the time
        needed = needed + np.where(needed < _LONG, 0, needed // 4)
        sizes = np.maximum(_MIN_SIZE, 1 << np.ceil(np.log2(needed)).astype(np.int64))
        # closing the gaps costs O(n), so it waits until a third of the arena is free
        if self._used + int(sizes.sum()) > len(self._arena) and 3 * self._num_free > self._used:
            stay = np.flatnonzero(self._sizes)
            rows, lengths = self.rows_of(stay)
            ends = np.cumsum(self._sizes[stay], dtype=np.int64)
            self.starts[stay] = ends - self._sizes[stay]
            self._used, self._num_free, self._free = (int(ends[-1]) if len(ends) else 0), 0, {}
            self._arena[csr_indices(self.starts[stay], lengths)] = rows
        for size in np.unique(sizes).tolist():
            these = prompts[sizes == size]
            # blocks have power-of-two sizes, so a released one fits the next of its size
            free = self._free.get(size, [])
            num_reused = min(len(free), len(these))
            starts = free[len(free) - num_reused :]
            del free[len(free) - num_reused :]
            self._num_free -= num_reused * size
            num_fresh = len(these) - num_reused
            fresh = self._used + size * np.arange(num_fresh)
            if (used := self._used + num_fresh * size) > len(self._arena):
                arena = np.empty(max(used, 3 * len(self._arena) // 2), dtype=np.int64)
                arena[: self._used] = self._arena[: self._used]
                self._arena = arena
            self._used = used
            self.starts[these] = np.concatenate([np.array(starts, dtype=np.int64), fresh])
            self._sizes[these] = size
            self.lengths[these] = 0


class PromptSet:
    """A set of prompt numbers: one flag per number 0, 1, ..., and the count of members in every 64 numbers."""

    def __init__(self) -> None:
        self._flags = np.zeros(_CHUNK, dtype=bool)
        self._chunks = np.zeros(1, dtype=np.int64)
        self._ends: NDArray[np.int64] | None = None
        """Running sums of _chunks; None: not computed yet."""
        self.num = 0

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self._flags.nbytes + self._chunks.nbytes

    def grow(self, num_prompts: int) -> None:
        """Extend the arrays to all prompt numbers below `num_prompts`."""
        num_chunks = -(-num_prompts // _CHUNK)
        if num_chunks > len(self._chunks):
            self._ends = None
            self._flags = np.concatenate([self._flags, np.zeros(num_chunks * _CHUNK - len(self._flags), dtype=bool)])
            self._chunks = np.concatenate([self._chunks, np.zeros(num_chunks - len(self._chunks), dtype=np.int64)])

    def put(self, prompts: Prompts, members: NDArray[np.bool_]) -> None:
        """Set whether each of `prompts` [k], distinct, is a member."""
        changed = np.flatnonzero(self._flags[prompts] != members)
        if not len(changed):
            return
        self._ends = None
        joined = members[changed]
        self._flags[prompts[changed]] = joined
        np.add.at(self._chunks, prompts[changed] // _CHUNK, np.where(joined, 1, -1))
        self.num += 2 * int(np.count_nonzero(joined)) - len(changed)

    def put_all(self, members: NDArray[np.bool_]) -> None:
        """Set the members to exactly `members` [P]."""
        self._ends = None
        self._flags[:] = False
        self._flags[: len(members)] = members
        self._chunks = self._flags.reshape(-1, _CHUNK).sum(axis=1)
        self.num = int(self._chunks.sum())

    def all(self) -> Prompts:
        """Return the members, ascending. O(P)."""
        return np.flatnonzero(self._flags)

    def by_rank(self, ranks: NDArray[np.int64]) -> Prompts:
        """Return the members of ranks [k], 0 <= rank < num, counted from the smallest number. O(P / 64 + 64 k)."""
        if self._ends is None:
            self._ends = np.cumsum(self._chunks)
        ends = self._ends
        chunks = np.searchsorted(ends, ranks, side="right")
        rest = ranks - (ends[chunks] - self._chunks[chunks])
        # int8 is enough: a chunk has at most 64 members
        seen = np.cumsum(self._flags.reshape(-1, _CHUNK)[chunks], axis=1, dtype=np.int8)
        return chunks * _CHUNK + np.count_nonzero(seen <= rest[:, None], axis=1)


def csr_indices(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the ranges starts[i] .. starts[i] + lengths[i] - 1 for i = 0 .. n - 1, as one vector."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


@dataclass(frozen=True, slots=True)
class Groups:
    """Items [n] grouped by key: `order` [n] sorts the items by key, and keeps the order of items with equal keys.

    Group g has key keys[g] and the items order[firsts[g] : firsts[g] + sizes[g]].
    """

    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def count(self, flags: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return how many items of each group have the flag [n]."""
        return np.add.reduceat(flags[self.order], self.firsts, dtype=np.int64)


def group_by(keys: NDArray[np.integer]) -> Groups:
    """Group items [n] by `keys` [n], 0 <= key < 2^31, 0 < n < 2^32."""
    # one sort of key and number together is stable, and faster than a stable sort
    both = keys.astype(np.int64) << 32
    both |= np.arange(len(keys))
    both.sort()
    order, ordered = both & 0xFFFFFFFF, both >> 32
    is_first = np.empty(len(keys), dtype=bool)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    firsts = np.flatnonzero(is_first)
    sizes = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=sizes[:-1])
    sizes[-1] = len(keys) - firsts[-1]
    return Groups(ordered[firsts], order, firsts, sizes)
