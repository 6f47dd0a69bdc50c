"""Draw exactly from p = (1 - u) softmax(inverse_temperature * value) + u / n over the leaves that are members.

    uniform part   the member of a random rank, by a tree of ones
    softmax part   w = exp(inverse_temperature * (value - reference)) lies in (0, 1]. A tree holds the whole number
                   W = ceil(w * 2^38), so that sums are exact; a leaf drawn by W is kept with probability w * 2^38 / W,
                   else drawn again: kept leaves follow w exactly. Of n leaves at most n * 2^-38 * e^4 are not kept.

The reference is the largest value, rounded up to a multiple of 4 / inverse_temperature. It depends on the members
alone, so the same members in the same order give the same draws in every process, and it moves rarely.

Without replacement, `gumbel_top_k` draws by the largest sums of log probability and Gumbel noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike, NDArray

_TOP = 4096
"""Nodes of the top level. `find` begins with running sums over them, which are faster than more levels."""


class SumTree:
    """A sum tree over whole-number weights of numbered leaves: `set` and `find` take O(log n) per leaf.

    A complete binary tree in one array: node i has children 2i and 2i + 1, leaf j is node capacity + j. Sums of whole
    numbers are exact in any order, so nothing drifts. Two trees with the same leaves in the same order give the same
    draws, even if one has more empty leaves in between.

    Args:
        num_leaves: number of leaves, rounded up to a power of two.
        dtype: integer type of the sums; the total must fit.
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
        """Memory of the nodes in bytes."""
        return self._nodes.nbytes

    def leaves(self, num: int) -> NDArray:
        """Return the weights of the first `num` leaves (a view: read only)."""
        return self._nodes[self.capacity : self.capacity + num]

    def build(self, weights: NDArray) -> None:
        """Set the first leaves to `weights` [n], n <= capacity; the others must be 0. O(n)."""
        self._ends = None
        self.leaves(len(weights))[:] = weights
        first, num = self.capacity, len(weights)
        while first > self._top:
            first, num = first // 2, (num + 1) // 2
            # only the part above leaves in use: memory that is never touched costs nothing
            np.add(
                self._nodes[2 * first : 2 * (first + num) : 2],
                self._nodes[2 * first + 1 : 2 * (first + num) : 2],
                out=self._nodes[first : first + num],
            )

    def set(self, leaves: NDArray[np.int64], weights: NDArray) -> None:
        """Set `leaves` [k], ascending and distinct, to `weights` [k]. O(k log n)."""
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
        """Return the leaf [k] where the running sum of weights passes each target, and the target's offset in it [k].

        0 <= target < total.
        """
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
        """Return the sum of the leaves before `leaf` (0 <= leaf <= capacity)."""
        if leaf >= self.capacity:
            return self.total
        node, total = leaf + self.capacity, 0
        while node >= 2 * self._top:
            if node & 1:
                total += int(self._nodes[node - 1])
            node >>= 1
        return total + int(self._running()[node - self._top]) - int(self._nodes[node])

    def _running(self) -> NDArray[np.int64]:
        """Return the running sums over the nodes of the top level, one per node."""
        if self._ends is None:
            self._ends = np.cumsum(self._nodes[self._top : 2 * self._top], dtype=np.int64)
        return self._ends


LOWEST = -1e300
_SCALE = float(2**38)
_STEP = 4.0
MAX_EXCESS = 2.0**-38 * math.exp(_STEP)
"""Relative excess of exp(`log_mass_bound`) over the exact sum: less than this times the number of members."""
Leaves = NDArray[np.int64]
Keeps = Callable[[Leaves], NDArray[np.bool_]]


class Priorities:
    """Numbered leaves, some of which are members with a value; draws choose members (see the module docstring).

    Args:
        values: [n] value of each leaf; ignored for leaves that are no members.
        members: [n] whether each leaf is a member.
        inverse_temperature: of the softmax; with 0 draws are uniform, and the values are not stored.
    """

    def __init__(self, values: NDArray[np.float64], members: NDArray[np.bool_], inverse_temperature: float) -> None:
        self.inverse_temperature = inverse_temperature
        self._num_leaves = len(members)
        self._ones = SumTree(len(members), np.int32)
        self._ones.build(members)
        self._weights: SumTree | None = None
        if inverse_temperature:
            self._weights = SumTree(len(members))
            self._values = np.zeros(self._weights.capacity)
            self._values[: len(members)] = np.where(members, values, 0.0)
            self._find_top()
            self._weigh_all()

    @property
    def num(self) -> int:
        """Number of members."""
        return self._ones.total

    @property
    def capacity(self) -> int:
        """Number of leaves; `set` takes leaves below it."""
        return self._ones.capacity

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self._ones.num_bytes + (self._weights.num_bytes + self._values.nbytes if self._weights else 0)

    @property
    def log_mass_bound(self) -> float:
        """Upper bound of `log_mass` in O(1): each term of the sum is rounded up as in the module docstring."""
        if self._weights is None:
            return math.log(self.num) if self.num else -math.inf
        if not self.num:
            return -math.inf
        top = min(max(self.inverse_temperature * self._reference, LOWEST), -LOWEST)
        return top + math.log(self._weights.total / _SCALE)

    def set(self, leaves: Leaves, values: NDArray[np.float64], members: NDArray[np.bool_]) -> None:
        """Set value and membership of `leaves` [k] (ascending, distinct, < capacity). O(k log n)."""
        if not len(leaves):
            return
        self._num_leaves = max(self._num_leaves, int(leaves[-1]) + 1)
        if self._weights is None:
            self._ones.set(leaves, members)
            return
        # the number of members with the largest value is kept: only when none is left is the largest searched again
        was_top = (self._ones.leaves(self.capacity)[leaves] > 0) & (self._values[leaves] == self._top)
        self._ones.set(leaves, members)
        self._values[leaves] = np.where(members, values, 0.0)
        self._num_top -= int(np.count_nonzero(was_top))
        new = values[members]
        if len(new) and new.max() >= self._top:
            self._num_top = int(np.count_nonzero(new == new.max())) + (self._num_top if new.max() == self._top else 0)
            self._top = float(new.max())
        if self._num_top <= 0:
            self._find_top()
        # all weights are relative to the reference; it moves in steps, so this is rare
        if _reference(self._top, self.inverse_temperature) != self._reference:
            self._weigh_all()
        else:
            self._weights.set(leaves, np.where(members, np.ceil(self._weight(values)), 0))

    def by_rank(self, ranks: NDArray[np.int64]) -> Leaves:
        """Return the leaves [k] of the members with these ranks [k]. Rank 0 is the smallest leaf; 0 <= rank < num."""
        return self._ones.find(ranks)[0]

    def num_before(self, leaf: int) -> int:
        """Return the number of members before `leaf`."""
        return self._ones.before(leaf)

    def draw(self, num: int, uniform_share: float, rng: np.random.Generator, keeps: Keeps | None = None) -> Leaves:
        """Return the leaves of `num` independent draws, with replacement. There must be a member.

        Args:
            num: number of draws.
            uniform_share: u of the module docstring.
            rng: random generator of the batch.
            keeps: returns which leaves [k] of the softmax part to keep, [k] bool; the others are drawn again.
        """
        if self._weights is None or uniform_share >= 1:
            return self.by_rank(rng.integers(0, self.num, num))
        leaves = np.empty(num, dtype=np.int64)
        missing = np.arange(num)
        if uniform_share > 0:
            uniform = rng.random(num) < uniform_share
            leaves[uniform] = self.by_rank(rng.integers(0, self.num, int(np.count_nonzero(uniform))))
            missing = np.flatnonzero(~uniform)
        # a rejected leaf is drawn again: so kept leaves follow w exactly, although the tree holds W
        while len(missing):
            drawn, depth = self._weights.find(rng.integers(0, self._weights.total, len(missing)))
            kept = depth + rng.random(len(missing)) < self._weight(self._values[drawn])
            if keeps:
                kept &= keeps(drawn)
            leaves[missing[kept]] = drawn[kept]
            missing = missing[~kept]
        return leaves

    def log_mass(self) -> float:
        """Return the log of the sum of exp(inverse_temperature * value) over the members. O(n)"""
        if self._weights is None:
            return self.log_mass_bound
        values = self._values[np.flatnonzero(self._ones.leaves(self._num_leaves))]
        top = min(max(self.inverse_temperature * self._reference, LOWEST), -LOWEST)
        return top + math.log(self._weight(values).sum() / _SCALE)

    def gumbel_terms(
        self, uniform_share: float, revalue: Callable[[Leaves, NDArray[np.float64]], NDArray[np.float64]] | None = None
    ) -> tuple[Leaves, NDArray[np.float64], float]:
        """Return the members [n], ascending; and for `gumbel_top_k` their terms [n] and the noise's scale. O(leaves).

        Args:
            uniform_share: u of the module docstring.
            revalue: replaces the values: takes members [n] and their values [n], returns values [n].
        """
        members = np.flatnonzero(self._ones.leaves(self._num_leaves))
        values = np.zeros(len(members)) if self._weights is None else self._values[members]
        values = revalue(members, values) if revalue else values
        scale = self.inverse_temperature
        return members, *gumbel_terms(values, inverse_temperature=scale, uniform_share=uniform_share)

    def _find_top(self) -> None:
        members = self._values[: self._num_leaves][self._ones.leaves(self._num_leaves) > 0]
        self._top = float(members.max()) if len(members) else 0.0
        self._num_top = int(np.count_nonzero(members == self._top))

    def _weigh_all(self) -> None:
        assert self._weights is not None
        self._reference = _reference(self._top, self.inverse_temperature)
        members = self._ones.leaves(self._num_leaves) > 0
        self._weights.build(np.where(members, np.ceil(self._weight(self._values[: self._num_leaves])), 0))

    def _weight(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return w * 2^38 of values [n], at least a tiny number, so that every member has a leaf weight above 0."""
        with np.errstate(over="ignore"):
            logits = self.inverse_temperature * (np.minimum(values, self._reference) - self._reference)
        return np.maximum(np.exp(np.maximum(logits, -700.0)) * _SCALE, 1e-290)


def _reference(top: float, inverse_temperature: float) -> float:
    steps = top * inverse_temperature / _STEP
    if abs(steps) > 2**40:
        return top  # a step is below the resolution of the value
    return max(top, math.ceil(steps) * _STEP / inverse_temperature)


def log_probabilities(
    values: NDArray[np.float64], *, inverse_temperature: float, uniform_share: float
) -> NDArray[np.float64]:
    """Return the log of (1 - u) softmax(inverse_temperature * value) + u / n, finite for finite values. [n] -> [n]"""
    num = len(values)
    uniform = np.full(num, -np.log(num))
    if inverse_temperature == 0 or uniform_share >= 1:
        return uniform
    with np.errstate(over="ignore"):
        logits = np.maximum(inverse_temperature * (values - values.max()), LOWEST)
    softmax = logits - np.log(np.exp(logits).sum())
    if uniform_share == 0:
        return softmax
    return np.logaddexp(np.log1p(-uniform_share) + softmax, np.log(uniform_share) + uniform)


def gumbel_terms(
    values: NDArray[np.float64], *, inverse_temperature: float, uniform_share: float
) -> tuple[NDArray[np.float64], float]:
    """Return the terms [n] and the scale of the noise with which `gumbel_top_k` draws by `log_probabilities`."""
    # the values themselves: multiplied by a large number, some could not be told apart (but a tiny inverse temperature
    # cannot be divided by)
    if uniform_share == 0 and inverse_temperature > 1e-280:
        return values, 1 / inverse_temperature
    log_p = log_probabilities(values, inverse_temperature=inverse_temperature, uniform_share=uniform_share)
    return log_p, 1.0


def gumbel_noise(num: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return Gumbel noise [num]. Descending log p + noise is the order of draws by p without replacement."""
    return -np.log(np.maximum(rng.standard_exponential(num), 1e-300))


def gumbel_top_k(terms: NDArray[np.float64], noise: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """Return the places of the `num` largest terms + noise of each row, largest first. [S, n], [S, n] -> [S, num]

    Sums are compared as if they were exact. A term of -inf is chosen only if a row has fewer than `num` others.
    """
    keys = -(terms + noise)
    width = min(num + 1, keys.shape[1])  # one more: does the last one tie with what is left out?
    if keys.shape[1] > 4 * width:
        order = np.argpartition(keys, num, axis=1)[:, :width]
        order = np.take_along_axis(order, np.argsort(np.take_along_axis(keys, order, axis=1), axis=1), axis=1)
    else:
        order = np.argsort(keys, axis=1)[:, :width]
    best = np.take_along_axis(keys, order, axis=1)
    tied = np.flatnonzero((best[:, 1:] == best[:, :-1]).any(axis=1))
    # noise is lost beside a large term: where rounding makes two sums equal, what was rounded off decides
    if len(tied):
        a, b = terms[tied], noise[tied]
        with np.errstate(invalid="ignore"):  # -inf - -inf
            # (a + b) - float64(a + b), exactly (TwoSum; Knuth, TAOCP 2, section 4.2.2)
            rounded = a + b
            b_part = rounded - a
            rounded_off = (a - (rounded - b_part)) + (b - b_part)
        order[tied] = np.lexsort((-rounded_off, keys[tied]), axis=1)[:, :width]
    return order[:, :num]
