"""Exact match, as text (`exact`) and as an integer (`addition`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tba_reward.registry import BadDataError, Example, Registry, Reward

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)", re.ASCII)


def canonical_integer(text: str) -> str | None:
    """The one way to write the integer that `text` is, or None if it is not one.

    An integer is an optional sign and ASCII digits, nothing between or around them. Leading zeros and `+` do not count
    and `-0` is 0: `007` and `+7` are 7. `7.0`, `7.`, `1,000` and `1e3` are not integers.
    """
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def score_text(prompt: str, response: str, data: Mapping[str, Any]) -> float:
    """1.0 if the response and the answer are the same text but for surrounding white space."""
    return float(response.strip() == _answer(data))


def score_integer(prompt: str, response: str, data: Mapping[str, Any]) -> float:
    """1.0 if the response, but for surrounding white space, is the same integer as the answer."""
    answer = canonical_integer(_answer(data))
    if answer is None:
        raise BadDataError(f"data.answer {data['answer']!r} is not an integer")
    return float(canonical_integer(response.strip()) == answer)


def register(registry: Registry) -> None:
    """Add `exact` and `addition`."""
    example = Example(prompt="6+6=", response=" 12\n", data={"answer": "12"}, reward=1.0)
    registry.add(Reward(task="exact", version="exact-1", function=score_text, example=example, fast=True))
    registry.add(Reward(task="addition", version="addition-1", function=score_integer, example=example, fast=True))


def _answer(data: Mapping[str, Any]) -> str:
    answer = data.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        raise BadDataError(f"data needs a text `answer`, got {answer!r}")
    return answer.strip()
