"""A set of prompt numbers that answers "which is the r-th smallest?" quickly, whatever the order they came in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CHUNK = 64
Prompts = NDArray[np.int64]


class PromptSet:
    """Members among prompt numbers 0, 1, ...: one flag each, and the members of every 64 counted."""

    def __init__(self) -> None:
        self._flags = np.zeros(_CHUNK, dtype=bool)
        self._chunks = np.zeros(1, dtype=np.int64)
        self._ends: NDArray[np.int64] | None = None
        """Running sums of _chunks; none: to be computed."""
        self.num = 0

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return self._flags.nbytes + self._chunks.nbytes

    def grow(self, num_prompts: int) -> None:
        """Make room for prompt numbers below `num_prompts`."""
        num_chunks = -(-num_prompts // _CHUNK)
        if num_chunks > len(self._chunks):
            self._ends = None
            self._flags = np.concatenate([self._flags, np.zeros(num_chunks * _CHUNK - len(self._flags), dtype=bool)])
            self._chunks = np.concatenate([self._chunks, np.zeros(num_chunks - len(self._chunks), dtype=np.int64)])

    def put(self, prompts: Prompts, members: NDArray[np.bool_]) -> None:
        """Say of `prompts` [k], distinct, whether each is a member."""
        changed = np.flatnonzero(self._flags[prompts] != members)
        if not len(changed):
            return
        self._ends = None
        joined = members[changed]
        self._flags[prompts[changed]] = joined
        np.add.at(self._chunks, prompts[changed] // _CHUNK, np.where(joined, 1, -1))
        self.num += 2 * int(np.count_nonzero(joined)) - len(changed)

    def put_all(self, members: NDArray[np.bool_]) -> None:
        """The members are exactly these, `members` [P]."""
        self._ends = None
        self._flags[:] = False
        self._flags[: len(members)] = members
        self._chunks = self._flags.reshape(-1, _CHUNK).sum(axis=1)
        self.num = int(self._chunks.sum())

    def by_rank(self, ranks: NDArray[np.int64]) -> Prompts:
        """The members of these ranks [k], 0 <= rank < num, counted from the smallest number. O(P / 64 + 64 k)."""
        if self._ends is None:
            self._ends = np.cumsum(self._chunks)
        ends = self._ends
        chunks = np.searchsorted(ends, ranks, side="right")
        rest = ranks - (ends[chunks] - self._chunks[chunks])
        seen = np.cumsum(self._flags.reshape(-1, _CHUNK)[chunks], axis=1, dtype=np.int8)
        return chunks * _CHUNK + np.count_nonzero(seen <= rest[:, None], axis=1)
