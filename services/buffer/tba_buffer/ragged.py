"""Groups of different sizes as one vector: items by their key, and many ranges one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def ragged(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ..., then the same of starts[1], ...; lengths [n] say how many of each."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


@dataclass(frozen=True, slots=True)
class Groups:
    """Items [n] by key: `order` [n] puts equal keys together, keys ascending, items of one key in their own order.

    Group g has key keys[g] and the items order[firsts[g] : firsts[g] + sizes[g]].
    """

    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def count(self, flags: NDArray[np.bool_]) -> NDArray[np.int64]:
        """How many items of each group have the flag [n]."""
        return np.add.reduceat(flags[self.order], self.firsts, dtype=np.int64)


def group_by(keys: NDArray[np.integer]) -> Groups:
    """Items [n] by `keys` [n], 0 <= key < 2^31, 0 < n < 2^32."""
    # one sort of key and number together: stable without the slower stable sort
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
