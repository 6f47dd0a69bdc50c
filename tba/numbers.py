"""How large a number may be that somebody else sends: one bound for REST bodies, the wire and score replies.

Every number there is a quantity: a reward, a log-prob, a count, a time, a step, a gauge. None of them comes near
MAX_NUMBER in a run that works, and below it nothing that is done with them later overflows: sums and means of all that
Redis can hold are finite, squares too, in float32 as well; and whole numbers are exact as a float, in JSON and in Lua.
What is larger, infinite or NaN is refused where it enters, or unknown where the rest of a message is worth keeping.

Two things are no quantities: seeds (MAX_SEED), and what a prompt holds for its scorer, in which a gold answer may have
any size (MAX_DIGITS).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MAX_NUMBER = 10**15
MAX_LINEAGE = 10**9 - 1
MAX_STEP = 10**12 - 1
"""The largest that the text of a policy version holds."""
MAX_SEED = 2**63 - 1
"""The largest that msgpack, numpy and torch all take."""
MAX_DIGITS = 1000
"""Of a whole number in a prompt's data; Python reads none of more than 4,300."""


def is_bounded(value: float) -> bool:
    """Whether a number is one that may enter; NaN is not."""
    return -MAX_NUMBER <= value <= MAX_NUMBER


def bounded(value: float) -> float:
    """The number itself.

    Raises:
        ValueError: it may not enter.
    """
    if not is_bounded(value):
        raise ValueError(f"every number is from -{MAX_NUMBER:g} to {MAX_NUMBER:g}; send what was meant, or null")
    return value


def known(value: float | None) -> float | None:
    """The number as a float; None, which is unknown, where it is none that may enter."""
    return float(value) if value is not None and is_bounded(value) else None


def mean(values: Iterable[float]) -> float | None:
    """None without values.

    Raises:
        OverflowError: they are from before there was a bound, and their sum is no number.
    """
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None
