"""Means with 95 % confidence intervals from few seeds, and paired bootstraps over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t quantile 0.975 for 1 to 9 degrees of freedom."""
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `num` seeds and the half width of its t interval (NaN for one seed)."""

    mean: float
    half_width: float
    num: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.num < 2 else f"{self.mean:.3f} ± {self.half_width:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of 1 to 10 values.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("no values to take the mean of")
    if len(values) == 1:
        return Estimate(values[0], math.nan, 1)
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), T_975[len(values) - 2] * spread, len(values))


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure of paired values with its 95 % percentile bootstrap over the pairs."""

    value: float
    low: float
    high: float
    num: int


def ratio_interval(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Interval:
    """Ratio of the means of paired values (NaN where the lower mean is 0)."""
    return _bootstrap(above, below, lambda a, b: a / np.where(b == 0, math.nan, b), seed)


def difference_interval(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Interval:
    """Difference of the means of paired values."""
    return _bootstrap(ours, theirs, lambda a, b: a - b, seed)


def _bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    figure: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
    seed: int,
) -> Interval:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(a), size=(NUM_RESAMPLES, len(a)))
    figures = figure(a[picks].mean(axis=1), b[picks].mean(axis=1))
    low, high = np.nanquantile(figures, [0.025, 0.975])
    return Interval(float(figure(a.mean(), b.mean())), float(low), float(high), len(a))
