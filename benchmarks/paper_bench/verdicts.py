"""Agrees, disagrees or undecided: one rule for all claims, on pairs of the same seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.study.stats import estimate

Word = Literal["agrees", "disagrees", "undecided"]
Pairs = Mapping[int, tuple[float, float]]
"""Seed -> the figure on the side that the claim says is greater, and on the other."""
MIN_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a claim's pairs say."""

    word: Word
    text: str
    """The figures with their interval, in words."""


def judge(pairs: Pairs, *, margin: float = 0.0, is_ratio: bool = False) -> Verdict:
    """Decide a claim "the first side is greater than the second one, less `margin`".

    The rule: with three seeds or more, the 95 % t interval of the paired differences decides. All of it above -margin:
    agrees; all of it below: disagrees; else undecided, as with fewer seeds. (A bootstrap of three pairs covers too
    little: it excludes 0 wherever all three have one sign, which one time in four is chance.)

    Args:
        pairs: at least one.
        margin: what the first side may lose where the claim is that it keeps up.
        is_ratio: compare by ratio (differences of logarithms); the margin is 0 then.
    """
    scale = math.log if is_ratio else float
    differences = [scale(ours) - scale(theirs) for ours, theirs in pairs.values()]
    found, back = estimate(differences), (math.exp if is_ratio else float)
    how = ".2f" if is_ratio else "+.3f"
    value = format(back(found.mean), how)
    if found.num < MIN_SEEDS:
        word: Word = "undecided"
        span = f"range {format(back(min(differences)), how)} to {format(back(max(differences)), how)}"
    else:
        low, high = found.mean - found.half_width, found.mean + found.half_width
        word = "agrees" if low > -margin else "disagrees" if high < -margin else "undecided"
        span = f"{format(back(low), how)} to {format(back(high), how)}"
    first, second = (sum(side) / len(pairs) for side in zip(*pairs.values(), strict=True))
    seeds = f"{found.num} seed{'s' * (found.num > 1)}"
    sides = f"{first:.3g} against {second:.3g}"
    name = "ratio" if is_ratio else "difference"
    return Verdict(word=word, text=f"{sides}: {name} **{value}** ({span}; {seeds})")
