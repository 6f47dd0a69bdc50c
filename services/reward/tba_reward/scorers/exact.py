"""Kind `exact`: the response is the answer, as a text or as a whole number."""

from __future__ import annotations

import re

from tba.config.reward import ExactSpec
from tba_reward.scorer import (
    BadDataError,
    Example,
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

IMPLEMENTATION = 1
_INTEGER = re.compile(r"([+-]?)([0-9]+)", re.ASCII)


def build(spec: ExactSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    example = Example(Item(prompt="6+6=", response=" 12\n", data={spec.field: "12"}), 1.0)
    rule = score_integer if spec.compare == "integer" else score_text
    return InlineScorer(rule, params_of(spec), version=version_of(spec, IMPLEMENTATION), example=example)


def score_text(item: Item, params: Params) -> float:
    """Return 1.0 if response and answer are the same text but for surrounding white space."""
    field = params["field"]
    return score_any(gold_answers(item, field), lambda gold: item.response.strip() == _text(gold, field))


def score_integer(item: Item, params: Params) -> float:
    """Return 1.0 if the response, but for surrounding white space, is the same integer as the answer."""
    field = params["field"]
    response = canonical_integer(item.response.strip())

    def is_same(gold: object) -> bool:
        answer = canonical_integer(_text(gold, field))
        if answer is None:
            raise BadDataError(f"data.{field} {gold!r:.200} is not an integer")
        return response == answer

    return score_any(gold_answers(item, field), is_same)


def canonical_integer(text: str) -> str | None:
    """Return the canonical form of an integer, or None if the text is not one.

    An integer is an optional sign and ASCII digits, nothing between or around them. Leading zeros and `+` do not count
    and `-0` is 0: `007` and `+7` are 7. `7.0`, `7.`, `1,000` and `1e3` are not integers.
    """
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match[1], match[2].lstrip("0") or "0"
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def _text(answer: object, field: str) -> str:
    # JSON's true is an int in Python, and no answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        raise BadDataError(f"data needs a text `{field}`, got {answer!r:.200}")
    return answer.strip()
