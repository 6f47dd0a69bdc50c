"""Kind `make_n`: write an expression that is worth the target, for example 24 from 3, 3, 8, 8 as `8/(3-8/3)`.

    expression := product (("+" | "-") product)*
    product    := atom (("*" | "/") atom)*
    atom       := INTEGER | "(" expression ")"

The whole response, but for spaces, must be one expression with at least one operator (a bare target is no solution).
It is parsed here and computed with exact fractions; Python evaluates nothing. With `numbers` in the data, each of them
may be used at most once, and no other number. Bad syntax, a division by zero, or an expression beyond the limits is a
wrong answer, 0. The limits keep every value below 10^MAX_CHARS.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from tba.config.reward import MakeNSpec
from tba_reward.scorer import BadDataError, Example, InlineScorer, Item, Params, Scorer, params_of, version_of
from tba_reward.scorers import Tools

IMPLEMENTATION = 1
MAX_CHARS = 256
MAX_DEPTH = 32
MAX_DIGITS = 12

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))", re.ASCII)


def build(spec: MakeNSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    example = Example(Item(prompt="", response="8 / (3 - 8/3)", data={"target": 24, "numbers": [3, 3, 8, 8]}), 1.0)
    return InlineScorer(score, params_of(spec), version=version_of(spec, IMPLEMENTATION), example=example)


def score(item: Item, params: Params) -> float:
    """Return 1.0 if the response is an expression worth the target that uses only the allowed numbers."""
    target, allowed = _target(item), _numbers(item)
    try:
        parser = _Parser(item.response.strip())
        value = parser.parse()
    except (NotAnExpressionError, ZeroDivisionError):
        return 0.0
    # the target alone is no solution; numbers that are left over were used too often
    if parser.num_operators == 0 or (allowed is not None and parser.numbers - allowed):
        return 0.0
    return float(value == target)


def _target(item: Item) -> int:
    target = item.data.get("target")
    # JSON's true is an int in Python, and no target
    if not isinstance(target, int) or isinstance(target, bool):
        raise BadDataError(f"data needs a whole number `target`, got {target!r:.200}")
    return target


def _numbers(item: Item) -> Counter[int] | None:
    numbers = item.data.get("numbers")
    if numbers is None:
        return None
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise BadDataError(f"data.numbers must be a list of whole numbers from 0 on, got {numbers!r:.200}")
    return Counter(numbers)


class NotAnExpressionError(ValueError):
    """The text is not an expression of this grammar, or is beyond the limits."""


class _Parser:
    """A recursive descent parser that computes the value while it reads."""

    def __init__(self, text: str) -> None:
        # the limits keep every value small, so that no response takes long
        if len(text) > MAX_CHARS:
            raise NotAnExpressionError(f"{len(text)} characters, the limit is {MAX_CHARS}")
        self.numbers: Counter[int] = Counter()
        self.num_operators = 0
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    def parse(self) -> Fraction:
        """Return the value of the whole text."""
        value = self._expression()
        if self._peek() is not None:
            raise NotAnExpressionError(f"unexpected {self._peek()!r}")
        return value

    def _expression(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpressionError(f"more than {MAX_DEPTH} nested parentheses")
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            right = self._product()
            value = value + right if sign == "+" else value - right
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while (sign := self._take("*", "/")) is not None:
            right = self._atom()
            value = value * right if sign == "*" else value / right
        return value

    def _atom(self) -> Fraction:
        token = self._peek()
        if token is None:
            raise NotAnExpressionError("ends too early")
        self._at += 1
        if token == "(":
            value = self._expression()
            if self._peek() != ")":
                raise NotAnExpressionError("a parenthesis is not closed")
            self._at += 1
            return value
        if not token.isdigit() or len(token) > MAX_DIGITS:
            raise NotAnExpressionError(f"{token!r} is not an integer of at most {MAX_DIGITS} digits")
        self.numbers[int(token)] += 1
        return Fraction(int(token))

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *operators: str) -> str | None:
        token = self._peek()
        if token not in operators:
            return None
        self._at += 1
        self.num_operators += 1
        return token


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotAnExpressionError(f"unexpected {text[at]!r}")
        tokens.append(match[1] or match[2])
        at = match.end()
    return tokens
