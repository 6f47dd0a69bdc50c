"""GSM8K: the last number of the response against the gold answer.

The rule: remove all commas; a number is ASCII digits with an optional fraction (`12`, `12.50`, `.5`), and a minus
directly before it is its sign unless a letter, digit or closing bracket stands before the minus (`5-3` ends in 3);
the last one counts. Numbers are compared exactly (`18.00` is 18). No number at all is a wrong answer, 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tba_reward.registry import BadDataError, Example, Registry, Reward

_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z)\]])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", re.ASCII)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    last = None
    for match in _NUMBER.finditer(text.replace(",", "")):
        last = match
    return None if last is None else Decimal(last.group())


def score(prompt: str, response: str, data: Mapping[str, Any]) -> float:
    """1.0 if the last number of the response is the answer."""
    answer = str(data.get("answer")).replace(",", "").strip()
    if _NUMBER.fullmatch(answer) is None:
        raise BadDataError(f"data needs an `answer` that is one number, got {data.get('answer')!r}")
    return float(last_number(response) == Decimal(answer))


def register(registry: Registry) -> None:
    """Add `gsm8k`."""
    example = Example(prompt="", response="so 1,000 + 8 = $1,008.", data={"answer": "1,008"}, reward=1.0)
    registry.add(Reward(task="gsm8k", version="gsm8k-1", function=score, example=example, fast=True))
