"""Kind `last_number` (GSM8K): the last number of the response against the gold answer.

The rule: remove all commas; a number is ASCII digits with an optional fraction (`12`, `12.50`, `.5`), and a minus
(ASCII or U+2212) directly before it is its sign unless a letter, digit or closing bracket stands before the minus
(`5-3` ends in 3); the last one counts. Numbers are compared exactly (`18.00` is 18). No number at all is a wrong
answer, 0.
"""

from __future__ import annotations

import re
from decimal import Decimal

from tba.config.reward import LastNumberSpec
from tba_reward.scorers.base import BadDataError, Example, Item, Params, Scorer, Tools, params_of, version_of
from tba_reward.scorers.inline import InlineScorer

IMPLEMENTATION = 2
_MINUS_SIGN = "\u2212"
_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z)\]])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", re.ASCII)


def build(spec: LastNumberSpec, tools: Tools) -> Scorer:
    """The scorer."""
    example = Example(Item(prompt="", response="so 1,000 + 8 = $1,008.", data={spec.field: "1,008"}), 1.0)
    return InlineScorer(score, params_of(spec), version=version_of(spec, IMPLEMENTATION), example=example)


def score(item: Item, params: Params) -> float:
    """1.0 if the last number of the response is the answer."""
    field = params["field"]
    answer = str(item.data.get(field)).replace(",", "").replace(_MINUS_SIGN, "-").strip()
    if _NUMBER.fullmatch(answer) is None:
        raise BadDataError(f"data needs a `{field}` that is one number, got {item.data.get(field)!r:.200}")
    return float(last_number(item.response) == Decimal(answer))


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    last = None
    for match in _NUMBER.finditer(text.replace(",", "").replace(_MINUS_SIGN, "-")):
        last = match
    return None if last is None else Decimal(last.group())
