"""Whole-number weights over numbered leaves: change some, draw one by its share of the total, both in O(log n).

Sums of whole numbers are exact whatever their order, so that there is no drift, and two trees with the same leaves in
the same order answer alike even where one has more empty leaves in between.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

_TOP = 4096
"""The level with this many nodes is the top one: running sums over it are faster than the levels above it would be."""


class SumTree:
    """A complete binary tree in one array: node i has children 2i and 2i + 1, leaf j is node capacity + j.

    Args:
        num_leaves: leaves to make room for.
        dtype: of the sums; the total must fit.
    """

    def __init__(self, num_leaves: int, dtype: DTypeLike = np.int64) -> None:
        self.capacity = 1 << max(0, num_leaves - 1).bit_length()
        self._top = min(self.capacity, _TOP)
        self._nodes = np.zeros(2 * self.capacity, dtype=dtype)
        self._ends: NDArray[np.int64] | None = None

    @property
    def total(self) -> int:
        """Sum of all leaves."""
        return int(self._running()[-1])

    @property
    def num_bytes(self) -> int:
        """Memory of the nodes."""
        return self._nodes.nbytes

    def leaves(self, num: int) -> NDArray:
        """Weights of the first `num` leaves (a view: read only)."""
        return self._nodes[self.capacity : self.capacity + num]

    def build(self, weights: NDArray) -> None:
        """Set the first leaves to `weights` [n], n <= capacity; the others must be 0. O(n)."""
        self._ends = None
        self.leaves(len(weights))[:] = weights
        first, num = self.capacity, len(weights)
        while first > self._top:
            first, num = first // 2, (num + 1) // 2
            # only the part above leaves in use: the rest of the array is never touched, so it costs no memory
            np.add(
                self._nodes[2 * first : 2 * (first + num) : 2],
                self._nodes[2 * first + 1 : 2 * (first + num) : 2],
                out=self._nodes[first : first + num],
            )

    def set(self, leaves: NDArray[np.int64], weights: NDArray) -> None:
        """Change `leaves` [k], ascending and distinct. O(k log n)."""
        self._ends = None
        nodes = leaves + self.capacity
        self._nodes[nodes] = weights
        level = self.capacity
        while level > self._top and len(nodes) > 1:
            nodes, level = nodes >> 1, level // 2
            is_first = np.empty(len(nodes), dtype=bool)
            is_first[0] = True
            np.not_equal(nodes[1:], nodes[:-1], out=is_first[1:])
            nodes = nodes[is_first]
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]
        node = int(nodes[0]) if len(nodes) else 0
        while level > self._top and node:
            node, level = node // 2, level // 2
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    def find(self, targets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The leaf that holds each target [k], 0 <= target < total, and how far into its weight the target lies."""
        ends = self._running()
        nodes = np.searchsorted(ends, targets, side="right")
        rest = targets - ends[nodes]
        nodes += self._top
        rest += self._nodes[nodes]
        for _ in range((self.capacity // self._top).bit_length() - 1):
            nodes *= 2
            left = self._nodes[nodes]
            right = rest >= left
            left *= right
            rest -= left
            nodes += right
        return nodes - self.capacity, rest

    def before(self, leaf: int) -> int:
        """Sum of the leaves before `leaf` (0 <= leaf <= capacity)."""
        if leaf >= self.capacity:
            return self.total
        node, total = leaf + self.capacity, 0
        while node >= 2 * self._top:
            if node & 1:
                total += int(self._nodes[node - 1])
            node >>= 1
        return total + int(self._running()[node - self._top]) - int(self._nodes[node])

    def _running(self) -> NDArray[np.int64]:
        """Sum of the nodes of the top level up to each one, itself included. [top]"""
        if self._ends is None:
            self._ends = np.cumsum(self._nodes[self._top : 2 * self._top], dtype=np.int64)
        return self._ends
