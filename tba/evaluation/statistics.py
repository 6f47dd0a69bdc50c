"""Means with standard errors, over prompts that may have several completions each; pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tba.evaluation.evaluation_job import Estimate

Nested = Sequence[Sequence[float]]
"""The known values, indexed by [prompt][completion]."""


def mean_of_prompts(values: Nested) -> Estimate:
    """Average the known values of each prompt, then average over prompts; prompts without values are left out."""
    known = [list(map(float, part)) for part in values if len(part)]
    # one prompt has no spread over prompts: then the completions are the sample
    means = known[0] if len(known) == 1 else [math.fsum(part) / len(part) for part in known]
    return Estimate(
        value=math.fsum(means) / len(means) if means else None,
        stderr=_stderr_of_mean(means),
        num_prompts=len(known),
        num_completions=sum(map(len, known)),
    )


def success_rate(successes: Sequence[Sequence[bool | None]]) -> Estimate:
    """Return the success rate; unknown scores (None) are left out of the value, and widen the bounds `low`, `high`."""
    # unknown scores say nothing, so they are left out, and the two bounds say how much that could matter
    rate = mean_of_prompts([[float(one) for one in part if one is not None] for part in successes])
    if all(one is not None for part in successes for one in part):
        return rate
    low, high = (
        mean_of_prompts([[float(unknown if one is None else one) for one in part] for part in successes]).value
        for unknown in (False, True)
    )
    return rate.model_copy(update={"low": low, "high": high})


def exp_of_ratio(numerators: Nested, denominators: Nested) -> Estimate:
    """Return exp(sum of numerators / sum of denominators), such as a perplexity over all tokens together.

    The standard error is by the delta method. The denominators must be above 0.
    """
    pairs = [(sum(n), sum(d)) for n, d in zip(numerators, denominators, strict=True) if len(n)]
    num_prompts, num_completions = len(pairs), sum(map(len, numerators))
    if num_prompts == 1:
        pairs = [pair for n, d in zip(numerators, denominators, strict=True) for pair in zip(n, d, strict=True)]
    if not pairs:
        return Estimate(value=None, stderr=None, num_prompts=0, num_completions=0)
    top, bottom = np.array(pairs, np.float64).T
    ratio = top.sum() / bottom.sum()
    # the residuals of the ratio, linearised: numerator and denominator are correlated
    error = _stderr_of_mean(((top - ratio * bottom) / bottom.mean()).tolist())
    value = finite_exp(ratio)
    return Estimate(
        value=value,
        stderr=None if error is None or value is None else value * error,
        num_prompts=num_prompts,
        num_completions=num_completions,
    )


def finite_exp(value: float) -> float | None:
    """Return exp(value); None if it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return None


def mean_of_pairs(distances: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the mean of a symmetric matrix [N, N] without its diagonal, and the jackknife standard error of the mean.

    Both are None for N < 2; the standard error is None for N < 3.
    """
    num = len(distances)
    if num < 2:
        return None, None
    of_each = distances.sum(axis=1) - np.diag(distances)  # [N]
    total = of_each.sum()
    mean = float(total / (num * (num - 1)))
    if num < 3:
        return mean, None
    without = (total - 2 * of_each) / ((num - 1) * (num - 2))  # [N]: the mean without each one
    spread = ((without - without.mean()) ** 2).sum()
    return mean, float(np.sqrt((num - 1) / num * spread))


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) for n >= k (arXiv 2107.03374, Eq. 1)."""
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def _stderr_of_mean(values: Sequence[float]) -> float | None:
    return None if len(values) < 2 else float(np.std(values, ddof=1) / math.sqrt(len(values)))
