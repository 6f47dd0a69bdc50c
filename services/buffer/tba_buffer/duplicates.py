"""Which stored rollouts a newer one with the same prompt and tokens replaces."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tba_buffer.index import Index, Rows

MERGE_ABOVE = 4096
GROWTH = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
Keys = NDArray[np.uint64]


class Duplicates:
    """Remembers the newest rollout of every (prompt, response tokens) it was shown: 16 bytes each.

    Two sorted levels: a small one that takes the new rollouts, and a large one of n that it is merged into when it has
    grown to GROWTH sqrt(n). So a look-up is two binary searches, and adding a push of 64 copies some 16 sqrt(n) keys
    in all, however many rollouts one prompt has. What is gone is forgotten when it makes up half.
    """

    def __init__(self) -> None:
        self._large = _Level()
        self._small = _Level()

    def replaced(self, index: Index, new: Rows) -> Rows:
        """Live rows that a newer row replaces, now that `new` rows (ascending, never shown before) have arrived."""
        hashes = index.column("token_hash", new)
        new, hashes = new[hashes != 0], hashes[hashes != 0]
        if not len(new):
            return new
        # 64 bits for both: that two of a million answers share a key by chance has a probability of 3e-8
        keys = (index.column("prompt", new).astype(np.uint64) + np.uint64(1)) * _MIX ^ hashes
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], new[order]
        newest = np.append(keys[1:] != keys[:-1], True)
        gone = [rows[~newest]]
        keys, rows = keys[newest], rows[newest]
        for level in (self._small, self._large):
            old = index.rows_at(level.find(keys))
            gone.append(old[old >= 0])
        self._small = self._small.with_newer(keys, index.column("position", rows))
        if len(self._small.keys) > max(MERGE_ABOVE, GROWTH * math.isqrt(len(self._large.keys))):
            self._large = self._large.with_newer(self._small.keys, self._small.positions)
            self._small = _Level()
            if len(self._large.keys) > 2 * index.num_live:
                self._large = self._large.only(index.column("position", index.live_rows()))
        return np.unique(np.concatenate(gone))


class _Level:
    """Sorted keys [N], each once, and the position of each [N]."""

    def __init__(self, keys: Keys | None = None, positions: Keys | None = None) -> None:
        self.keys = np.zeros(0, dtype=np.uint64) if keys is None else keys
        self.positions = np.zeros(0, dtype=np.uint64) if positions is None else positions

    def find(self, keys: Keys) -> Keys:
        """Position of each key, 0 (which nothing has) where the key is unknown."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.uint64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.positions[at], np.uint64(0))

    def with_newer(self, keys: Keys, positions: Keys) -> _Level:
        """This level and sorted `keys`; where both have a key, the new position holds."""
        at = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), dtype=np.bool_)
        inside = at < len(self.keys)
        known[inside] = self.keys[at[inside]] == keys[inside]
        positions, own = positions.astype(np.uint64), self.positions.copy()
        own[at[known]] = positions[known]
        return _Level(np.insert(self.keys, at[~known], keys[~known]), np.insert(own, at[~known], positions[~known]))

    def only(self, positions: Keys) -> _Level:
        """What has one of `positions`."""
        kept = np.isin(self.positions, positions)
        return _Level(self.keys[kept], self.positions[kept])
