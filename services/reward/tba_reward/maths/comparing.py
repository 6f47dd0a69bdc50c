r"""Whether an answer is the gold answer. What is written plainly is decided here, the rest by math-verify.

Both sides are the content of a box, without their units (`.units`). In this order:

1. The same text but for spacing and dollar signs: right.
2. Two plain numbers or collections of them (`.numbers`, `.collections`), two times of day, two numbers with a base,
   words on either side (`.words`): compared as what they are.
3. Everything else: what has words in it that are no mathematics is not read (`.words.is_prose`); math-verify reads the
   rest. Rational numbers are compared exactly, expressions that differ at some point are different (`.expressions`),
   and what is left math-verify compares.

math-verify guards itself with `signal.alarm`, which does not work in every thread; its guards are off here
(`parsing_timeout=None`), and **a caller must be able to kill the process**.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase, nan, zoo
from sympy.core.relational import Relational

from tba_reward.maths.collections import same_collection
from tba_reward.maths.expressions import differ_somewhere, is_unsolved, same_exactly, with_imaginary_unit
from tba_reward.maths.numbers import DECIMAL_PLACES, FAR_APART, e_as_power, plain_number, same_number
from tba_reward.maths.units import without_unit
from tba_reward.maths.words import is_prose, same_based, same_clock, same_words, words_behind_number

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # each warns once that its timeouts are off: they are on purpose

_EXPRESSION = ExprExtractionConfig()
_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=replace(LatexExtractionConfig().normalization_config, units=False),
)
"""Its own rule for units leaves out any text behind a number, and a variable that is called like a unit (`4m`)."""
_ROMAN_LETTER = re.compile(r"\\mathrm\s*\{\s*([A-Za-z])\s*\}")
_FONT_ALONE = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*[0-9][^{}]*)\}")
_NUMBER_FIRST = re.compile(r"\s*([^A-Za-z]*[0-9])\s*([^0-9]*)", re.ASCII)
_SPACES = re.compile(r"\s+(?![0-9A-Za-z])|(?<![0-9A-Za-z])\s+|\\left(?![a-z])|\\right(?![a-z])")
"""Spaces that separate nothing, and the size of brackets."""
_EXPONENT = re.compile(r"\^\s*\{?\s*-?[0-9]+\s*\}?")
_VARIABLE = re.compile(r"^[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*=\s*(?=[-+0-9.\\])")
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_ROOT = re.compile(r"\u221a\s*(?:\{([^{}]*)\}|\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_VULGAR = "\u00bc\u00bd\u00be\u2150\u2151\u2152\u2153\u2154\u2155\u2156\u2157\u2158\u2159\u215a\u215b\u215c\u215d\u215e"
_FRACTIONS = {char: unicodedata.normalize("NFKC", char).split("\u2044") for char in _VULGAR}
_CHARACTERS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {char: rf"\frac{{{over}}}{{{under}}}" for char, (over, under) in _FRACTIONS.items()}
    | {"\u2212": "-", "\ufe63": "-", "\u00d7": r"\times ", "\u22c5": r"\cdot ", "\u00b0": r"^\circ ", "\u03c0": r"\pi "}
    | {"\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2205": r"\emptyset "}
)
_DASH_SIGN = re.compile(r"^\s*[\u2010-\u2013]\s*(?=[0-9.\\])")
_OUTER = re.compile(r"\s*(?:\$\$?|\\[(\[])?(.*?)(?:\$\$?|\\[)\]])?\s*\.?\s*", re.DOTALL)

Reading = tuple[Any, ...]
"""What math-verify reads in a text: at most one expression of sympy, then the text it was read from."""


class UnreadableError(ValueError):
    """An answer cannot be read as mathematics, or not be compared: neither right nor wrong is known."""


class UnreadableGoldError(UnreadableError):
    """The gold answer cannot be read or has no value."""


@lru_cache(maxsize=8192)
def same_answer(gold: str, answer: str, units: frozenset[str] = frozenset()) -> bool:
    """Whether the answer is the gold one; both are the content of a box. Kept: the responses to a prompt often agree.

    Args:
        units: words in small letters that are units as well.

    Raises:
        UnreadableError: this cannot be told.
    """
    gold, units = tidy_gold(gold, units)
    answer = tidy(answer, units)
    plainly = _same_plainly(gold, answer)
    if plainly is not None:
        return plainly
    _refuse_prose(answer, gold)
    return same_reading(read_gold(gold), read_box(answer))


def same_anywhere(gold: str, text: str, units: frozenset[str] = frozenset()) -> bool:
    """Whether the answer that math-verify finds in a text without a box is the gold one; no answer is not.

    Raises:
        UnreadableError: this cannot be told.
    """
    gold, units = tidy_gold(gold, units)
    reading = _read(e_as_power(_ROMAN_LETTER.sub(r"\1", text)), (_LATEX, _EXPRESSION))
    if not reading:
        return False
    found = str(reading[-1])
    answer = tidy(found, units)
    plainly = _same_plainly(gold, answer)
    if plainly is not None:
        return plainly
    _refuse_prose(answer, gold)
    return same_reading(read_gold(gold), _mathematics(reading, found))


def check_gold(gold: str, units: frozenset[str] = frozenset()) -> None:
    """Read a gold answer, and compare it with itself and with 1: both are easy unless the gold itself is not.

    Raises:
        UnreadableError: it cannot be read, or not be compared.
    """
    gold, _ = tidy_gold(gold, units)
    if _same_plainly(gold, "") is None:
        same_reading(read_gold(gold), read_gold(gold))
        with suppress(UnreadableError):  # a set is no number; what counts is the time that the gold's value takes
            same_reading(read_gold(gold), read_box("1"))


def tidy_gold(gold: str, units: frozenset[str]) -> tuple[str, frozenset[str]]:
    """A gold answer as `tidy` makes it, and the units of the answers: also the words that it has behind its number.

    Raises:
        UnreadableGoldError: it is prose.
    """
    units |= words_behind_number(tidy(gold))
    gold = tidy(gold, units)
    if is_prose(gold):
        raise UnreadableGoldError(f"{gold[:200]!r} is prose; a gold answer is a number, LaTeX, a name or a few words")
    return gold, units


def tidy(text: str, units: frozenset[str] = frozenset()) -> str:
    r"""A text without its unit, and the dollar signs, white space and full stop around it.

    `\mathrm{e}` is `e`, `\text{7}` is `7`, and signs that are one character (a half, a root) are their LaTeX.
    """
    text = " ".join(text.split())  # first of all: _OUTER takes cubic time on a long run of spaces
    match = _OUTER.fullmatch(text)
    text = _font_alone(match[1] if match else text)
    text = _DASH_SIGN.sub("-", _RAISED.sub(_as_power, _ROOT.sub(_as_root, text))).translate(_CHARACTERS)
    text = _ROMAN_LETTER.sub(r"\1", without_unit(" ".join(text.split()), units))
    return " ".join(text.replace(r"\varnothing", r"\emptyset").split())


def _refuse_prose(answer: str, gold: str) -> None:
    if is_prose(answer, gold):
        raise UnreadableError(f"{answer[:200]!r} has words in it that are neither units nor mathematics")


def _font_alone(text: str) -> str:
    """A number that is written as a text, without the font; what stands behind it stays in letters that are upright."""
    match = _FONT_ALONE.fullmatch(text)
    if match is None:
        return text
    number = _NUMBER_FIRST.fullmatch(match[1])
    return match[1] if number is None or not number[2] else rf"{number[1]}\text{{ {number[2]}}}"


def _as_power(match: re.Match[str]) -> str:
    return "^{" + "".join("0123456789-"[_SUPERSCRIPTS.index(char)] for char in match[0]) + "}"


def _as_root(match: re.Match[str]) -> str:
    return rf"\sqrt{{{match[1] or match[2] or match[3]}}}"


def _same_plainly(gold: str, answer: str) -> bool | None:
    if _SPACES.sub("", gold) == _SPACES.sub("", answer):
        return True
    for same in (same_number, same_collection, same_clock, same_based, same_words):
        known = same(gold, answer)
        if known is not None:
            return known
    if "=" in gold and "=" in answer:
        return None
    return same_number(_VARIABLE.sub("", gold), _VARIABLE.sub("", answer))


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

    Raises:
        UnreadableError: it cannot be read, or digits are left out when it is.
    """
    number = plain_number(content)
    if number is not None and abs(number.exponent) > FAR_APART:
        raise UnreadableError(f"{content[:200]!r} is too large or too small to be compared with a formula")
    content = e_as_power(content)
    reading = _mathematics(_read(f"\\boxed{{{content}}}", (_LATEX,)), content)
    lost = _digits(content) - _digits(str(reading[-1]))
    if lost:
        raise UnreadableError(f"{content[:200]!r} is read as {str(reading[-1])[:200]!r}, which leaves numbers out")
    return reading


def _digits(text: str) -> Counter[str]:
    """How often each digit comes up, but for exponents: those of units are rightly left out."""
    return Counter(re.findall("[0-9]", _EXPONENT.sub("", text)))


def _read(text: str, config: Sequence[Any]) -> Reading:
    try:
        return tuple(parse(text, config, parsing_timeout=None, raise_on_error=True))  # type: ignore[arg-type]
    except (MemoryError, ImportError, OSError):  # faults of this process: no answer is to blame
        raise
    except Exception as error:  # whatever the grammar and sympy trip over stands in the text
        raise UnreadableError(f"{text[:200]!r} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _mathematics(reading: Reading, text: str) -> Reading:
    if not reading or isinstance(reading[0], str):
        raise UnreadableError(f"{text[:200]!r} cannot be read as mathematics")
    return reading


def same_reading(gold: Reading, answer: Reading) -> bool:
    """Whether two readings are worth the same.

    Raises:
        UnreadableError: the two cannot be compared.
        MemoryError: a value does not fit in the memory of this process.
    """
    try:
        return _same_reading(gold, answer)
    except (MemoryError, ImportError, OSError, UnreadableError):
        raise
    except Exception as error:  # whatever sympy trips over
        raise UnreadableError(
            f"{answer[-1][:200]!r} cannot be compared: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _same_reading(gold: Reading, answer: Reading) -> bool:
    gold, answer = tuple(map(with_imaginary_unit, gold)), tuple(map(with_imaginary_unit, answer))
    exactly = same_exactly(gold[0], answer[0])
    if exactly is not None:
        return exactly
    if differ_somewhere(gold[0], answer[0]):
        return False
    same = verify(
        list(gold),
        list(answer),
        float_rounding=DECIMAL_PLACES,
        allow_set_relation_comp=True,
        timeout_seconds=None,
        raise_on_error=True,
    )
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
