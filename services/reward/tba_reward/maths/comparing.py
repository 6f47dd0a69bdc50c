r"""Whether an answer is the gold answer. What is written plainly is decided here, the rest by math-verify.

Both sides are the content of a box. In this order:

1. The same text but for spacing and dollar signs: right.
2. Two plain numbers or collections of them (`tba_reward.maths.numbers`, `.collections`), two times of day, two numbers
   with a base, words on either side (`.words`): compared as what they are.
3. Everything else: math-verify reads both. Rational numbers are compared exactly, expressions that differ at some point
   are different (`tba_reward.maths.expressions`), and what is left math-verify compares.

math-verify guards itself with `signal.alarm`, which does not work in every thread; its guards are off here
(`parsing_timeout=None`), and **a caller must be able to kill the process**.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase, nan, zoo
from sympy.core.relational import Relational

from tba_reward.maths.collections import same_collection
from tba_reward.maths.expressions import differ_somewhere, is_unsolved, same_exactly, with_imaginary_unit
from tba_reward.maths.numbers import DECIMAL_PLACES, same_number
from tba_reward.maths.words import same_based, same_clock, same_words

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # each warns once that its timeouts are off: they are on purpose

_EXPRESSION = ExprExtractionConfig()
_LATEX = LatexExtractionConfig(boxed_match_priority=0)
_ROMAN_LETTER = re.compile(r"\\mathrm\s*\{\s*([A-Za-z])\s*\}")
_NUMBER_AS_TEXT = re.compile(r"\\text\s*\{\s*([+-]?[0-9][0-9.,/]*)(\s[^{}0-9]*)?\}", re.ASCII)
_SPACES = re.compile(r"\s+(?![0-9A-Za-z])|(?<![0-9A-Za-z])\s+|\\left(?![a-z])|\\right(?![a-z])")
"""Spaces that separate nothing, and the size of brackets."""
_EXPONENT = re.compile(r"\^\s*\{?\s*-?[0-9]+\s*\}?")
_OUTER = re.compile(r"\s*(?:\$\$?|\\[(\[])?(.*?)(?:\$\$?|\\[)\]])?\s*\.?\s*", re.DOTALL)

Reading = tuple[Any, ...]
"""What math-verify reads in a text: at most one expression of sympy, then the text it was read from."""


class UnreadableError(ValueError):
    """An answer cannot be read as mathematics, or not be compared: neither right nor wrong is known."""


class UnreadableGoldError(UnreadableError):
    """The gold answer cannot be read or has no value."""


@lru_cache(maxsize=8192)
def same_answer(gold: str, answer: str) -> bool:
    """Whether the answer is the gold one; both are the content of a box. Kept: the responses to a prompt often agree.

    Raises:
        UnreadableError: this cannot be told.
    """
    gold, answer = tidy(gold), tidy(answer)
    plainly = _same_plainly(gold, answer)
    return same_reading(read_gold(gold), read_box(answer)) if plainly is None else plainly


def same_anywhere(gold: str, text: str) -> bool:
    """Whether the answer that math-verify finds in a text without a box is the gold one; no answer is not.

    Raises:
        UnreadableError: this cannot be told.
    """
    reading = _read(_ROMAN_LETTER.sub(r"\1", text), (_LATEX, _EXPRESSION))
    if not reading:
        return False
    gold, found = tidy(gold), str(reading[-1])
    plainly = _same_plainly(gold, tidy(found))
    return same_reading(read_gold(gold), _mathematics(reading, found)) if plainly is None else plainly


def tidy(text: str) -> str:
    r"""A text without the dollar signs, white space and full stop around it; `\mathrm{e}` is `e`, `\text{7}` is `7`."""
    text = " ".join(text.split())  # first of all: _OUTER takes cubic time on a long run of spaces
    match = _OUTER.fullmatch(text)
    inner = _NUMBER_AS_TEXT.sub(_number_first, _ROMAN_LETTER.sub(r"\1", match[1] if match else text))
    return " ".join(inner.replace(r"\varnothing", r"\emptyset").replace("∞", r"\infty ").split())


def _number_first(match: re.Match[str]) -> str:
    unit = (match[2] or "").strip()
    return match[1] + (rf"\text{{{unit}}}" if unit else "")


def _same_plainly(gold: str, answer: str) -> bool | None:
    if _SPACES.sub("", gold) == _SPACES.sub("", answer):
        return True
    for same in (same_number, same_collection, same_clock, same_based, same_words):
        known = same(gold, answer)
        if known is not None:
            return known
    return None


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Reading:
    """The gold answer as math-verify reads it. Kept: the responses to one prompt share it.

    Raises:
        UnreadableGoldError: it cannot be read, or has no value.
    """
    try:
        reading = read_box(gold)
    except UnreadableError as error:
        raise UnreadableGoldError(str(error)) from error
    if reading[0] in (nan, zoo):
        raise UnreadableGoldError(f"the gold answer {gold[:200]!r} has no value")
    return reading


def read_box(content: str) -> Reading:
    r"""The content of a box as math-verify reads it.

    It takes everything after a number for a unit: what it reads in `5\text{ or even }6` is 5. Then nothing is read.

    Raises:
        UnreadableError: it cannot be read.
    """
    reading = _mathematics(_read(f"\\boxed{{{content}}}", (_LATEX,)), content)
    lost = _digits(content) - _digits(str(reading[-1]))
    if lost:
        raise UnreadableError(f"{content[:200]!r} is read as {str(reading[-1])[:200]!r}, which leaves numbers out")
    return reading


def _digits(text: str) -> Counter[str]:
    """How often each digit comes up, but for exponents: those of units are rightly left out."""
    return Counter(re.findall("[0-9]", _EXPONENT.sub("", text)))


def _read(text: str, config: Sequence[Any]) -> Reading:
    return tuple(parse(text, config, parsing_timeout=None, raise_on_error=True))  # type: ignore[arg-type]


def _mathematics(reading: Reading, text: str) -> Reading:
    if not reading or isinstance(reading[0], str):
        raise UnreadableError(f"{text[:200]!r} cannot be read as mathematics")
    return reading


def same_reading(gold: Reading, answer: Reading) -> bool:
    """Whether two readings are worth the same.

    Raises:
        UnreadableError: the two cannot be compared.
    """
    gold, answer = tuple(map(with_imaginary_unit, gold)), tuple(map(with_imaginary_unit, answer))
    exactly = same_exactly(gold[0], answer[0])
    if exactly is not None:
        return exactly
    if differ_somewhere(gold[0], answer[0]):
        return False
    try:
        same = verify(
            list(gold),
            list(answer),
            float_rounding=DECIMAL_PLACES,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        raise UnreadableError(f"{answer[-1][:200]!r} cannot be compared: {type(error).__name__}: {error}") from error
    if not same:
        _check_computable(gold[0])
        _check_computable(answer[0])
    elif is_unsolved(answer[0]) and not isinstance(gold[0], Relational):
        raise UnreadableError(f"{answer[-1][:200]!r} is an equation that is not solved for what it is about")
    return same


def _check_computable(part: Any) -> None:
    """math-verify swallows what goes wrong within it and says that the two differ; here it is raised again.

    Raises:
        MemoryError: the value does not fit in the memory of this process.
        RecursionError: it is nested too deeply.
    """
    try:
        if isinstance(part, Basic | MatrixBase):
            part.doit()
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return  # an expression that has no simpler form is compared as it is
