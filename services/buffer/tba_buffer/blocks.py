"""The rows of each prompt, ascending, in one arena: a block of power-of-two size per prompt.

Rows of every status lie in a block, dead ones until it is rewritten: when it is full, when more than half of it is
dead, and when nothing in it lives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tba_buffer.ragged import Groups, ragged

_MIN_SIZE = 4
_LONG = 256
Rows = NDArray[np.int64]
Prompts = NDArray[np.int64]


class Blocks:
    """start, length and size [P] of the block of each prompt number.

    Args:
        is_live: says of rows [n] which still live, [n] bool.
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
        """Memory."""
        arrays = (self._arena, self.starts, self.lengths, self._sizes)
        return sum(array.nbytes for array in arrays) + 8 * sum(map(len, self._free.values()))

    def grow(self, num_prompts: int) -> None:
        """Make room for prompt numbers below `num_prompts`."""
        if (more := num_prompts - len(self.starts)) > 0:
            self.starts = np.concatenate([self.starts, np.zeros(more, dtype=np.int64)])
            self.lengths = np.concatenate([self.lengths, np.zeros(more, dtype=np.int32)])
            self._sizes = np.concatenate([self._sizes, np.zeros(more, dtype=np.int32)])

    def rows(self, prompt: int) -> Rows:
        """The block of one prompt, dead rows too (a view: read only)."""
        start = int(self.starts[prompt])
        return self._arena[start : start + int(self.lengths[prompt])]

    def rows_of(self, prompts: Prompts) -> tuple[Rows, NDArray[np.int32]]:
        """The blocks of prompts [k] one after the other, dead rows too, and the length of each [k]."""
        lengths = self.lengths[prompts]
        return self._arena[ragged(self.starts[prompts], lengths)], lengths

    def rows_from(self, prompts: Prompts, skip: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
        """Like `rows_of`, without the first `skip` [k] rows of each."""
        lengths = self.lengths[prompts] - skip
        return self._arena[ragged(self.starts[prompts] + skip, lengths)], lengths

    def append(self, by_prompt: Groups, rows: Rows) -> Prompts:
        """Add rows [n] (ascending, newer than all before) of their prompts. Returns the prompts whose block moved."""
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
        """Rows of prompts [k] died, `live` [k] are left of each. Returns the prompts whose block moved."""
        length = self.lengths[prompts]
        moved = prompts[(length > 2 * live + 8) | ((live == 0) & (length > 0))]
        if len(moved):
            self._rewrite(moved, np.zeros(len(moved), dtype=np.int64))
        return moved

    def _rewrite(self, prompts: Prompts, num_new: NDArray[np.integer]) -> None:
        """New blocks without the dead rows and with room for `num_new` more."""
        rows, lengths = self.rows_of(prompts)
        alive = self._is_live(rows)
        owner = np.repeat(np.arange(len(prompts)), lengths)[alive]
        rows, lengths = rows[alive], np.bincount(owner, minlength=len(prompts))
        self._release(prompts)
        self._allocate(prompts, lengths + num_new)
        self.lengths[prompts] = lengths
        self._arena[ragged(self.starts[prompts], lengths)] = rows

    def _release(self, prompts: Prompts) -> None:
        for start, size in zip(self.starts[prompts].tolist(), self._sizes[prompts].tolist(), strict=True):
            if size:
                self._free.setdefault(size, []).append(start)
                self._num_free += size
        self._sizes[prompts] = self.lengths[prompts] = 0

    def _allocate(self, prompts: Prompts, needed: NDArray[np.integer]) -> None:
        prompts, needed = prompts[needed > 0], needed[needed > 0]
        # a long block gets a quarter more than it needs: a full one of steady length would be rewritten all the time
        needed = needed + np.where(needed < _LONG, 0, needed // 4)
        sizes = np.maximum(_MIN_SIZE, 1 << np.ceil(np.log2(needed)).astype(np.int64))
        if self._used + int(sizes.sum()) > len(self._arena) and 3 * self._num_free > self._used:
            self._repack()
        for size in np.unique(sizes).tolist():
            these = prompts[sizes == size]
            free = self._free.get(size, [])
            num_reused = min(len(free), len(these))
            starts = free[len(free) - num_reused :]
            del free[len(free) - num_reused :]
            self._num_free -= num_reused * size
            num_fresh = len(these) - num_reused
            fresh = self._reserve(num_fresh * size) + size * np.arange(num_fresh)
            self.starts[these] = np.concatenate([np.array(starts, dtype=np.int64), fresh])
            self._sizes[these] = size
            self.lengths[these] = 0

    def _reserve(self, num: int) -> int:
        if self._used + num > len(self._arena):
            arena = np.empty(max(self._used + num, 3 * len(self._arena) // 2), dtype=np.int64)
            arena[: self._used] = self._arena[: self._used]
            self._arena = arena
        self._used += num
        return self._used - num

    def _repack(self) -> None:
        """Close the gaps that released blocks left. O(n), after n rows' worth of releases."""
        prompts = np.flatnonzero(self._sizes)
        rows, lengths = self.rows_of(prompts)
        ends = np.cumsum(self._sizes[prompts], dtype=np.int64)
        self.starts[prompts] = ends - self._sizes[prompts]
        self._used, self._num_free, self._free = (int(ends[-1]) if len(ends) else 0), 0, {}
        self._arena[ragged(self.starts[prompts], lengths)] = rows
