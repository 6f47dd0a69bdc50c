"""Pearson's chi-square test, for checks that draws follow exact probabilities."""

from __future__ import annotations

import math

import numpy as np

P_MIN = 1e-4
"""A test fails below this p-value; seeds are fixed, so a correct sampler that passes once passes always."""

_MIN_EXPECTED = 5.0


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value (Wilson-Hilferty approximation). Cells with an expected count below 5 are merged."""
    small = expected < _MIN_EXPECTED
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < _MIN_EXPECTED:  # still too few for a cell: they join the largest one
            largest = int(np.argmax(expected[:-1]))
            observed[largest] += observed[-1]
            expected[largest] += expected[-1]
            observed, expected = observed[:-1], expected[:-1]
    dof = len(observed) - 1
    if dof == 0:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    z = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
    return 0.5 * math.erfc(z / math.sqrt(2))


def assert_follows(observed: np.ndarray, probabilities: np.ndarray) -> None:
    """Assert that counts [c] fit draws from probabilities [c], and that a cell of probability 0 was never drawn."""
    num = int(observed.sum())
    assert probabilities.sum() == 1 or abs(probabilities.sum() - 1) < 1e-9
    assert not observed[probabilities < 1e-12 / num].any(), "something impossible was drawn"
    p = chi_square_p(observed.astype(float), probabilities * num)
    assert p > P_MIN, f"chi-square p = {p:.2g}: observed {observed.tolist()}, expected {(probabilities * num).tolist()}"
