"""Decide whether an answer equals the gold answer. Plain answers are compared here, all others by math-verify.

Both are the content of a box, and their units are removed (units.py). The steps, in order:

1. Texts that differ only in spacing and dollar signs are equal, even if neither can be read.
2. Plain numbers and collections of them (numbers.py), times of day, numbers with a base, and words (text_answers.py)
   have their own comparisons.
3. An answer with words that are not mathematics cannot be read (`is_prose`). math-verify parses all others.
   Rational numbers are compared exactly. Expressions with different values at a test point are different. math-verify
   compares the rest.

math-verify limits its own time with `signal.alarm`, which works only in the main thread. Its limits are off here
(`parsing_timeout=None`), so **a caller must be able to kill the process**.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Equality, Expr, Float, I, MatrixBase, Mul, Rational, Symbol, UnevaluatedExpr, nan, zoo
from sympy.core.evalf import PrecisionExhausted
from sympy.core.relational import Relational

from tba_reward.math.numbers import DECIMAL_PLACES, FAR_APART, e_as_power, plain_number, same_collection, same_number
from tba_reward.math.text_answers import (
    FILLERS,
    is_prose,
    same_in_base,
    same_time_of_day,
    same_words,
    words_after_number,
)
from tba_reward.math.units import without_unit

_POINTS = ((Rational(7312, 10_000), Rational(10_871, 10_000)), (Rational(21_934, 10_000), Rational(5317, 10_000)))
"""Two points at which expressions are evaluated, each as (first, factor). The first variable in alphabetical order gets
`first`; each further one gets the value of the variable before it times `factor`."""
_DIGITS = 15
_CLEAR_DIFFERENCE = 1e-6
"""Two values differ if their relative difference is larger. Rounding to 15 digits causes a much smaller one."""
MAX_BARE_CHARS = 200
"""Longest text without a box that may be an answer and nothing else; a longer one is prose."""

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # each warns once that its timeouts are off, which is on purpose

_EXPRESSION = ExprExtractionConfig()
_LATEX = LatexExtractionConfig(
    boxed_match_priority=0, normalization_config=replace(LatexExtractionConfig().normalization_config, units=False)
)
"""`units=False`: math-verify's own removal of units also drops any text after a number, and variables (`4m`)."""
_ROMAN_LETTER = re.compile(r"\\mathrm\s*\{\s*([A-Za-z])\s*\}")
_FONT_ALONE = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*[0-9][^{}]*)\}")
_NUMBER_FIRST = re.compile(r"\s*([^A-Za-z]*[0-9])\s*([^0-9]*)", re.ASCII)
_SPACES = re.compile(r"\s+(?![0-9A-Za-z])|(?<![0-9A-Za-z])\s+|\\left(?![a-z])|\\right(?![a-z])")
_EXPONENT = re.compile(r"\^\s*\{?\s*-?[0-9]+\s*\}?")
_VARIABLE = re.compile(r"^[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*=\s*(?=[-+0-9.\\])")
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
_RAISED, _LOWERED = re.compile(f"[{_SUPERSCRIPTS}]+"), str.maketrans(_SUPERSCRIPTS, "0123456789-")
_SPECIAL_TOKEN = r"(?:<\|[A-Za-z0-9_]+\|>|</?s>|<(?:[be]os|pad|(?:start|end)_of_turn)>)"
_TOKENS_AROUND = re.compile(rf"^(?:\s*{_SPECIAL_TOKEN})+|(?:{_SPECIAL_TOKEN}\s*)+$")
_COUNTED = "[颗个個元円只隻人名位岁歳本张張枚条件支台次天页米克块棵개명원권]"
"""Chinese, Japanese and Korean counter words, which follow a number and do not change it; `5万` (50,000) has none."""
_COUNTED_AFTER = re.compile(rf"(?<=[0-9}}])\s*{_COUNTED}(?![\u3400-\u9fff\uac00-\ud7af])")
_SAID_BEFORE = re.compile(r"^[一总]?共\s*(?=[-0-9\\])")
_ARTICLE = re.compile(r"^(?:the\s+(?=\S)|an?\s+(?=[0-9]))", re.IGNORECASE)
_VARIABLE_LAST = re.compile(r"(?![A-Za-z]\s*=)([^=<>]+?)\s*=\s*([A-Za-z])")
_ANSWER_IS = re.compile(r"\b(?:answer|result)\s*(?:is|:|=)\s*|答案[是为:：]\s*", re.IGNORECASE)
_NAME_START = r"(?<![A-Za-z\\])(?<!\\text\{)(?<!\\mathrm\{)(?<!\\operatorname\{)"
_CONSTANT = re.compile(rf"{_NAME_START}(?:(pi)|inf(?:inity)?)(?![A-Za-z])")
_FUNCTION = re.compile(rf"{_NAME_START}((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log)(?=\s*[\\({{^_0-9]|\s+[A-Za-z])")
_CALL = re.compile(rf"{_NAME_START}(sqrt|abs|exp)\s*\(")
_CALLS = {"sqrt": (r"\sqrt{", "}"), "abs": (r"\left|", r"\right|"), "exp": ("e^{", "}")}
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

Parsed = tuple[Any, ...]
"""The result of math-verify's parser: (expression, source text), or only (source text), or () if nothing was found."""


class UnreadableError(ValueError):
    """An answer cannot be read as mathematics, or cannot be compared: it is neither right nor wrong."""


class UnreadableGoldError(UnreadableError):
    """The gold answer cannot be read or has no value."""


@lru_cache(maxsize=8192)
def same_answer(gold: str, answer: str) -> bool:
    """Return whether an answer equals the gold answer; both are the content of a box.

    Results are cached, because the responses to a prompt often agree. Raises UnreadableError as `same_value` does.
    """
    if without_spaces(gold) == without_spaces(answer) != "":
        return True
    gold, units = normalize_gold(gold)
    answer = normalize(answer, units | (words_after_number(normalize(answer)) & FILLERS))
    return _compare(gold, answer, lambda: parse_answer(answer))


def _compare(gold: str, answer: str, parsed: Callable[[], Parsed]) -> bool:
    """Return whether two normalized texts are equal. `parsed()` parses the answer; called only if that is needed."""
    plainly = _compare_plainly(gold, answer)
    if plainly is not None:
        return plainly
    if is_prose(answer, gold):
        raise UnreadableError(f"{answer[:200]!r} has words in it that are neither units nor mathematics")
    return same_value(parse_gold(gold), parsed())


def same_anywhere(gold: str, text: str) -> bool:
    """Return whether a text without a box, or the expression that math-verify finds in it, equals the gold answer."""
    # of a text that is nothing but the answer math-verify may take a part: the last number, the last formula
    bare = _ANSWER_IS.split(text)[-1]
    if len(bare) <= MAX_BARE_CHARS:
        with suppress(UnreadableError):
            if same_answer(gold, bare):
                return True
    gold, units = normalize_gold(gold)
    text = _TOKENS_AROUND.sub("", text)
    parsed = _parse(e_as_power(_ROMAN_LETTER.sub(r"\1", text)), (_LATEX, _EXPRESSION))
    if not parsed:
        return False
    found = str(parsed[-1])
    return _compare(gold, normalize(found, units), lambda: _require_expression(parsed, found))


def check_gold(gold: str) -> None:
    """Compare a gold answer with itself and with 1. If that fails or takes too long, the gold answer is to blame."""
    gold, _ = normalize_gold(gold)
    if _compare_plainly(gold, "") is None:
        same_value(parse_gold(gold), parse_gold(gold))
        with suppress(UnreadableError):  # a set is no number; the time that the gold's value takes is what matters
            same_value(parse_gold(gold), parse_answer("1"))


def normalize_gold(gold: str) -> tuple[str, frozenset[str]]:
    """Return the normalized gold answer, and the words after its number, which count as units in the answers.

    Raises:
        UnreadableGoldError: the gold answer is prose.
    """
    units = frozenset(words_after_number(normalize(gold)))
    gold = normalize(gold, units)
    if is_prose(gold):
        raise UnreadableGoldError(f"{gold[:200]!r} is prose; a gold answer is a number, LaTeX, a name or a few words")
    return gold, units


def normalize(text: str, units: frozenset[str] = frozenset()) -> str:
    r"""Return a text without its unit, and without the dollar signs, white space and full stop around it.

    `\mathrm{e}` becomes `e`, `\text{7}` becomes `7`, and Unicode signs such as a half or a root become LaTeX.
    """
    text = " ".join(_TOKENS_AROUND.sub("", text).split())  # first: _OUTER takes cubic time on a long run of spaces
    match = _OUTER.fullmatch(text)
    text = _ARTICLE.sub("", (match[1] if match else text).rstrip(" \\"))
    # a number in a font is the number; the text after it stays in upright letters
    if (in_font := _FONT_ALONE.fullmatch(text)) is not None:
        number = _NUMBER_FIRST.fullmatch(in_font[1])
        text = in_font[1] if number is None or not number[2] else rf"{number[1]}\text{{ {number[2]}}}"
    text = _COUNTED_AFTER.sub("", _SAID_BEFORE.sub("", text))
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_LOWERED)}}}", text)
    text = _DASH_SIGN.sub("-", text).translate(_CHARACTERS)
    text = _with_commands(_ROMAN_LETTER.sub(r"\1", without_unit(" ".join(text.split()), units)))
    equation = _VARIABLE_LAST.fullmatch(text)
    text = text if equation is None else f"{equation[2]}={equation[1]}"
    return " ".join(text.replace(r"\varnothing", r"\emptyset").split())


def _with_commands(text: str) -> str:
    r"""Replace names by LaTeX commands (`pi` by `\pi`), because math-verify reads bare names as letters."""
    text = _FUNCTION.sub(r"\\\1 ", _CONSTANT.sub(lambda match: r"\pi " if match[1] else r"\infty ", text))
    at = 0
    while (match := _CALL.search(text, at)) is not None:
        at, depth = match.end(), 1
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        if depth:
            return text
        opening, closing = _CALLS[match[1]]
        text = text[: match.start()] + opening + text[match.end() : at - 1] + closing + text[at:]
        at = match.start()
    return text


def without_spaces(text: str) -> str:
    r"""Return a text without spaces that separate nothing, and without `\left` and `\right`."""
    return _SPACES.sub("", " ".join(text.split()))


def _compare_plainly(gold: str, answer: str) -> bool | None:
    """Return whether two answers are equal, without parsing them; None if only parsing can tell."""
    if without_spaces(gold) == without_spaces(answer):
        return True
    for same in (same_number, same_collection, same_time_of_day, same_in_base, same_words):
        known = same(gold, answer)
        if known is not None:
            return known
    # of two equations the left sides matter
    if "=" in gold and "=" in answer:
        return None
    return same_number(_VARIABLE.sub("", gold), _VARIABLE.sub("", answer))


@lru_cache(maxsize=4096)
def parse_gold(gold: str) -> Parsed:
    """Return the gold answer as math-verify parses it. Results are cached for the other responses to the prompt."""
    try:
        parsed = parse_answer(gold)
    except UnreadableError as error:
        raise UnreadableGoldError(str(error)) from error
    if parsed[0] in (nan, zoo):
        raise UnreadableGoldError(f"the gold answer {gold[:200]!r} has no value")
    return parsed


def parse_answer(content: str) -> Parsed:
    r"""Return the content of a box as math-verify parses it.

    Raises:
        UnreadableError: it cannot be parsed, its power of ten is too large, or the parser has dropped digits.
    """
    number = plain_number(content)
    # sympy would multiply the power out
    if number is not None and abs(number.exponent) > FAR_APART:
        raise UnreadableError(f"{content[:200]!r} is too large or too small to be compared with a formula")
    content = e_as_power(content)
    parsed = _require_expression(_parse(f"\\boxed{{{content}}}", (_LATEX,)), content)
    # math-verify parses as much as it can and drops the rest
    lost = _digits(content) - _digits(str(parsed[-1]))
    if lost:
        raise UnreadableError(f"{content[:200]!r} is read as {str(parsed[-1])[:200]!r}, which leaves numbers out")
    return parsed


def _digits(text: str) -> Counter[str]:
    """Count each digit outside exponents; the parser may drop an exponent with its unit (`cm^2`)."""
    return Counter(re.findall("[0-9]", _EXPONENT.sub("", text)))


def _parse(text: str, config: Sequence[Any]) -> Parsed:
    try:
        return tuple(parse(text, config, parsing_timeout=None, raise_on_error=True))  # type: ignore[arg-type]
    except (MemoryError, ImportError, OSError):  # faults of this process: no answer is to blame
        raise
    except Exception as error:  # the grammar and sympy may raise anything over a text
        raise UnreadableError(f"{text[:200]!r} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _require_expression(parsed: Parsed, text: str) -> Parsed:
    if not parsed or isinstance(parsed[0], str):
        raise UnreadableError(f"{text[:200]!r} cannot be read as mathematics")
    return parsed


def same_value(gold: Parsed, answer: Parsed) -> bool:
    """Return whether two parsed answers have the same value.

    Raises:
        UnreadableError: the two cannot be compared.
        MemoryError: a value does not fit in the memory of this process.
    """
    try:
        gold, answer = tuple(map(with_imaginary_unit, gold)), tuple(map(with_imaginary_unit, answer))
        exactly = same_rational(gold[0], answer[0])
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
        # math-verify also says that they differ where it failed
        if not same:
            _check_computable(gold[0])
            _check_computable(answer[0])
        elif is_unsolved(answer[0]) and not isinstance(gold[0], Relational):
            raise UnreadableError(f"{answer[-1][:200]!r} is an equation that is not solved for what it is about")
        return same
    except (MemoryError, ImportError, OSError, UnreadableError):
        raise
    except Exception as error:  # sympy may raise anything over an expression
        raise UnreadableError(
            f"{answer[-1][:200]!r} cannot be compared: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _check_computable(part: Any) -> None:
    """Evaluate an expression to raise the MemoryError or RecursionError that math-verify reports as "different"."""
    try:
        if isinstance(part, Basic | MatrixBase):
            part.doit()
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return  # an expression without a simpler form is compared as it is


def with_imaginary_unit(part: Any) -> Any:
    """Return the expression with the imaginary unit in place of the variable `i`, as math-verify parses that letter."""
    if not isinstance(part, Basic | MatrixBase):
        return part
    letters = {symbol: I for symbol in part.free_symbols if str(symbol) == "i"}
    return part.subs(letters) if letters else part


def same_rational(gold: Any, answer: Any) -> bool | None:
    """Return whether two rational numbers are equal; None for other values, percentages, and decimals that differ."""
    # math-verify takes 1/2^99 for 1/2^98: it looks at 15 digits of the difference
    if not (_is_expression(gold) and _is_expression(answer)) or gold.free_symbols or answer.free_symbols:
        return None
    left, right = _with_fractions(gold).doit(), _with_fractions(answer).doit()
    if not (left.is_Rational and right.is_Rational):
        return None
    # decimals of the same number are the same (`0.1+0.2` is 0.3); others may still agree when they are rounded
    return left == right or (None if gold.has(Float) or answer.has(Float) else False)


def _with_fractions(expression: Basic) -> Basic:
    """Return the expression with an exact fraction for each decimal."""
    if not expression.has(Float):
        return expression
    return expression.replace(lambda part: part.is_Float, lambda part: Rational(str(part)))


def differ_somewhere(gold: Any, answer: Any) -> bool:
    """Return whether two exact expressions clearly have different values at a test point, and so are different.

    This takes 1 ms, and saves math-verify's attempt to simplify the difference to 0, which takes tens of ms.
    """
    # a word in LaTeX may be one symbol on one side and a product of letters on the other
    if any(not _is_expression(part) or part.has(Float) or isinstance(part, Symbol) for part in (gold, answer)):
        return False
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for first, factor in _POINTS:
        point: dict[Basic, Basic | float] = {name: first * factor**place for place, name in enumerate(names)}
        left, right = _value(gold, point), _value(answer, point)
        if left is None or right is None:
            return False
        if abs(left - right) > _CLEAR_DIFFERENCE * max(abs(left), abs(right)):
            return True
        if not names:
            return False
    return False


def is_unsolved(part: Any) -> bool:
    """Return whether this is an equation with a sum or product with a number on its left: `x+1=5`, not `a+b=5`.

    math-verify would take the right side (5) for the answer.
    """
    if not isinstance(part, Equality) or not part.lhs.free_symbols:
        return False
    return isinstance(part.lhs, Add | Mul) and any(each.is_Number for each in part.lhs.args)


def _is_expression(part: Any) -> bool:
    """Return whether this is an expression without percent signs: no set, tuple, relation or matrix."""
    return isinstance(part, Expr) and not part.has(UnevaluatedExpr)


def _value(expression: Expr, point: dict[Basic, Basic | float]) -> Expr | None:
    """Return the value of an expression at a point; None if it is not finite or its digits are not certain."""
    # strict: where all digits cancel out the value may be 0 (`x^2-x^2`), and no relative difference tells
    try:
        value = expression.evalf(_DIGITS, subs=point, strict=True)
    except (PrecisionExhausted, TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None
    real, imaginary = value.as_real_imag()
    return value if real.is_Number and imaginary.is_Number and value.is_finite else None
