"""Kind `last_number` (GSM8K): compare the last number of the response with the gold answer.

The rule: leave reasoning out and remove all commas. A number is ASCII digits with an optional fraction
(`12`, `12.50`, `.5`). A minus (ASCII or U+2212) directly before it is its sign, unless the minus follows a letter,
digit or closing bracket (`5-3` ends in 3). The last number counts, and is compared exactly (`18.00` is 18). A
response without a number is wrong, 0. The gold answer is one number, which may have a plus before it, or a list of
numbers, each of them right.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from tba.config.reward import LastNumberSpec
from tba_reward.math.extraction import after_reasoning
from tba_reward.scorer import (
    BadDataError,
    InlineScorer,
    Item,
    Params,
    Scorer,
    gold_answers,
    params_of,
    score_any,
    version_of,
)
from tba_reward.scorers import Tools

IMPLEMENTATION = 4
_MINUS_SIGN = "\u2212"
_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z)\]])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", re.ASCII)


def build(spec: LastNumberSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    return InlineScorer(score, params_of(spec), version=version_of(spec, IMPLEMENTATION))


def score(item: Item, params: Params) -> float:
    """Return 1.0 if the last number of the response is a gold answer, else 0.0."""
    found = last_number(after_reasoning(item.response, item.prompt))

    def is_equal(gold: object) -> bool:
        if isinstance(gold, float) and math.isfinite(gold):
            return found == Decimal(f"{gold:.15g}")  # 15 digits are exact in every double: 0.1 + 0.2 is 0.3
        # one plus may stand before it; `+-5` is no number
        text = re.sub(r"^\+(?!-)", "", str(gold).replace(",", "").replace(_MINUS_SIGN, "-").strip())
        if _NUMBER.fullmatch(text) is None:
            raise BadDataError(f"data needs a `{params['field']}` that is one number, got {gold!r:.200}")
        return found == Decimal(text)

    return score_any(gold_answers(item, params["field"]), is_equal)


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None if it has no number."""
    numbers = _NUMBER.findall(text.replace(",", "").replace(_MINUS_SIGN, "-"))
    return Decimal(numbers[-1]) if numbers else None
