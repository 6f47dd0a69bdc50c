"""Draws from p = (1 - u) softmax(inverse_temperature * value) + u / n over the members among numbered leaves. Exact.

    uniform part   the member of a random rank, by a tree of ones
    softmax part   w = exp(inverse_temperature * (value - reference)) lies in (0, 1]. A tree holds the whole number
                   W = ceil(w * 2^38), so that sums are exact; a leaf drawn by W is kept with probability w * 2^38 / W,
                   else drawn again: kept leaves follow w exactly. Of n leaves at most n * 2^-38 * e^4 are not kept.

The reference is the largest value, rounded up to a multiple of 4 / inverse_temperature: a function of the members
alone, so that the same members in the same order give the same draws in every process, and it moves rarely.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tba_buffer.sum_tree import SumTree

LOWEST = -1e300
_SCALE = float(2**38)
_STEP = 4.0
MAX_EXCESS = 2.0**-38 * math.exp(_STEP)
"""The bound of `log_mass_bound` exceeds the sum by less than this share per member."""
Leaves = NDArray[np.int64]
Keeps = Callable[[Leaves], NDArray[np.bool_]]


class Priorities:
    """Members among leaves 0, 1, ... with a value each.

    Args:
        values: [n] value of each leaf; ignored where it is no member.
        members: [n] bool.
        inverse_temperature: of the softmax; 0 is uniform (then values are not kept).
    """

    def __init__(self, values: NDArray[np.float64], members: NDArray[np.bool_], inverse_temperature: float) -> None:
        self.inverse_temperature = inverse_temperature
        self.origin = 0
        """Ranks are counted from this leaf on, and around."""
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
        """Members."""
        return self._ones.total

    @property
    def capacity(self) -> int:
        """Leaves that `set` may name."""
        return self._ones.capacity

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return self._ones.num_bytes + (self._weights.num_bytes + self._values.nbytes if self._weights else 0)

    @property
    def log_mass_bound(self) -> float:
        """log of the sum of exp(inverse_temperature * value), with each term rounded up as in the module docstring."""
        if self._weights is None:
            return math.log(self.num) if self.num else -math.inf
        if not self.num:
            return -math.inf
        top = min(max(self.inverse_temperature * self._reference, LOWEST), -LOWEST)
        return top + math.log(self._weights.total / _SCALE)

    def set(self, leaves: Leaves, values: NDArray[np.float64], members: NDArray[np.bool_]) -> None:
        """Change `leaves` [k] (ascending, distinct, < capacity); leaves never set are no members. O(k log n)."""
        if not len(leaves):
            return
        self._num_leaves = max(self._num_leaves, int(leaves[-1]) + 1)
        if self._weights is None:
            self._ones.set(leaves, members)
            return
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
        if _reference(self._top, self.inverse_temperature) != self._reference:
            self._weigh_all()
        else:
            self._weights.set(leaves, np.where(members, np.ceil(self._weight(values)), 0))

    def by_rank(self, ranks: NDArray[np.int64]) -> Leaves:
        """The members of these ranks [k], 0 <= rank < num, counted from `origin`."""
        return self._ones.find(_around(ranks, self._ones, self.origin))[0]

    def num_before(self, leaf: int) -> int:
        """Members with a leaf below `leaf`."""
        return self._ones.before(leaf)

    def draw(self, num: int, uniform_share: float, rng: np.random.Generator, keeps: Keeps | None = None) -> Leaves:
        """`num` independent draws. There must be a member.

        Args:
            num: draws.
            uniform_share: u.
            rng: of the batch.
            keeps: thins the softmax part further: of leaves [k] drawn, which are kept [k]; the others are drawn again.
        """
        if self._weights is None or uniform_share >= 1:
            return self.by_rank(rng.integers(0, self.num, num))
        leaves = np.empty(num, dtype=np.int64)
        missing = np.arange(num)
        if uniform_share > 0:
            uniform = rng.random(num) < uniform_share
            leaves[uniform] = self.by_rank(rng.integers(0, self.num, int(np.count_nonzero(uniform))))
            missing = np.flatnonzero(~uniform)
        while len(missing):
            drawn, kept = self._propose(len(missing), rng)
            if keeps:
                kept &= keeps(drawn)
            leaves[missing[kept]] = drawn[kept]
            missing = missing[~kept]
        return leaves

    def _propose(self, num: int, rng: np.random.Generator) -> tuple[Leaves, NDArray[np.bool_]]:
        """`num` leaves drawn by W, and which of them are kept."""
        assert self._weights is not None
        targets = rng.integers(0, self._weights.total, num)
        leaves, depth = self._weights.find(_around(targets, self._weights, self.origin))
        return leaves, depth + rng.random(num) < self._weight(self._values[leaves])

    def log_mass(self) -> float:
        """log of the sum of exp(inverse_temperature * value) over the members. O(n)"""
        if self._weights is None:
            return self.log_mass_bound
        values = self._values[np.flatnonzero(self._ones.leaves(self._num_leaves))]
        top = min(max(self.inverse_temperature * self._reference, LOWEST), -LOWEST)
        return top + math.log(self._weight(values).sum() / _SCALE)

    def race_terms(
        self, uniform_share: float, revalue: Callable[[Leaves, NDArray[np.float64]], NDArray[np.float64]] | None = None
    ) -> tuple[Leaves, NDArray[np.float64], float]:
        """All members by rank, and what `race` draws them by: a term of each, and the scale of the noise. O(n).

        Args:
            uniform_share: u.
            revalue: gives other values for members [n] with these values [n].
        """
        members = np.flatnonzero(self._ones.leaves(self._num_leaves))
        members = np.roll(members, -int(np.searchsorted(members, self.origin)))
        values = np.zeros(len(members)) if self._weights is None else self._values[members]
        terms, scale = race_terms(
            revalue(members, values) if revalue else values,
            inverse_temperature=self.inverse_temperature,
            uniform_share=uniform_share,
        )
        return members, terms, scale

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
        """w * 2^38, at least a tiny number, so that every member has a leaf weight."""
        with np.errstate(over="ignore"):
            logits = self.inverse_temperature * (np.minimum(values, self._reference) - self._reference)
        return np.maximum(np.exp(np.maximum(logits, -700.0)) * _SCALE, 1e-290)


def _around(targets: NDArray[np.int64], tree: SumTree, origin: int) -> NDArray[np.int64]:
    return (targets + tree.before(origin)) % tree.total if origin else targets


def _reference(top: float, inverse_temperature: float) -> float:
    steps = top * inverse_temperature / _STEP
    if abs(steps) > 2**40:
        return top  # a step is below the resolution of the value
    return max(top, math.ceil(steps) * _STEP / inverse_temperature)


def log_probabilities(
    values: NDArray[np.float64], *, inverse_temperature: float, uniform_share: float
) -> NDArray[np.float64]:
    """log of (1 - u) softmax(inverse_temperature * value) + u / n, finite for any finite values. [n] -> [n]"""
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


def race_terms(
    values: NDArray[np.float64], *, inverse_temperature: float, uniform_share: float
) -> tuple[NDArray[np.float64], float]:
    """(terms [n], scale) for `race`: the probabilities of `log_probabilities`, at any inverse temperature.

    Without a uniform share the terms are the values themselves: multiplied by a large number, some could not be told
    apart. An inverse temperature that is too small to divide by makes small logits.
    """
    if uniform_share == 0 and inverse_temperature > 1e-280:
        return values, 1 / inverse_temperature
    log_p = log_probabilities(values, inverse_temperature=inverse_temperature, uniform_share=uniform_share)
    return log_p, 1.0


def gumbel(num: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Noise [num]: in descending order of log p + noise, items are drawn one after the other without replacement."""
    return -np.log(np.maximum(rng.standard_exponential(num), 1e-300))


def race(terms: NDArray[np.float64], noise: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """The places of the `num` largest terms + noise of each row, largest first. [S, n], [S, n] -> [S, num]

    Sums are compared as if they were exact: where rounding makes two equal (noise is lost beside a large term), what
    was rounded off decides. -inf is never among the largest if a row has `num` others.
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
    if len(tied):
        rounded_off = -_rounding_error(terms[tied], noise[tied])
        order[tied] = np.lexsort((rounded_off, keys[tied]), axis=1)[:, :width]
    return order[:, :num]


def _rounding_error(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """(a + b) - float64(a + b), exactly (TwoSum; Knuth, TAOCP 2, section 4.2.2)."""
    with np.errstate(invalid="ignore"):  # -inf - -inf
        rounded = a + b
        b_part = rounded - a
        return (a - (rounded - b_part)) + (b - b_part)
