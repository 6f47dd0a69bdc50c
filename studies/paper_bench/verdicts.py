"""The one rule that says agrees, disagrees or undecided, from pairs of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Word = Literal["agrees", "disagrees", "undecided"]
Pairs = Mapping[Any, tuple[float, float]]
"""Seed, or models and seed -> the figure on the side that the claim says is greater, and on the other."""
MIN_PAIRS = 3
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t quantile 0.975 for 1 to 9 degrees of freedom."""
# degrees of freedom from 10 to 30
_MORE_T_975 = (
    *(2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064),
    *(2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a claim's pairs say."""

    word: Word
    text: str
    """The figures with their interval, in words."""


def half_width(values: Sequence[float], *, num_sets: int = 1) -> float:
    """Return the half width of the 95 % t interval of a mean.

    Values of one set of models are no independent draws of sets: each set takes a degree of freedom, while their
    spread stays in. Without a degree of freedom it is infinite.
    """
    num, freedom = len(values), len(values) - num_sets
    if freedom < 1:
        return math.inf
    mean, quantiles = sum(values) / num, (*T_975, *_MORE_T_975)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (num - 1) / num)
    return quantiles[min(freedom, len(quantiles)) - 1] * spread


def judge(pairs: Pairs, *, margin: float = 0.0, is_ratio: bool = False) -> Verdict:
    """Decide a claim "the first side is greater than the second one, less `margin`".

    The rule: with three pairs or more, the 95 % t interval of the paired differences decides. All of it above -margin:
    agrees; all of it below: disagrees; else undecided, as with fewer. (A bootstrap of three pairs covers too
    little: it excludes 0 wherever all three have one sign, which one time in four is chance.)

    Args:
        pairs: at least one.
        margin: what the first side may lose where the claim is that it keeps up.
        is_ratio: compare by ratio (differences of logarithms); the margin is 0 then.
    """
    scale, back = (math.log, math.exp) if is_ratio else (float, float)
    differences = [scale(ours) - scale(theirs) for ours, theirs in pairs.values()]
    num, num_sets = len(pairs), len({key[0] for key in pairs if isinstance(key, tuple)}) or 1
    mean, how = sum(differences) / num, ".2f" if is_ratio else "+.3f"
    around = half_width(differences, num_sets=num_sets)
    low, high = mean - around, mean + around
    word: Word = "undecided"
    if num >= MIN_PAIRS and math.isfinite(around):
        word = "agrees" if low > -margin else "disagrees" if high < -margin else "undecided"
        span = f"{format(back(low), how)} to {format(back(high), how)}"
    else:
        span = f"range {format(back(min(differences)), how)} to {format(back(max(differences)), how)}"
    first, second = (sum(side) / num for side in zip(*pairs.values(), strict=True))
    count = f"{num} pair{'s' * (num > 1)}" + (f", {num_sets} sets of models" if num_sets > 1 else "")
    name = "ratio" if is_ratio else "difference"
    text = f"{first:.3g} against {second:.3g}: {name} **{format(back(mean), how)}** ({span}; {count})"
    return Verdict(word=word, text=text)
