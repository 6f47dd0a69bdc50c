r"""Compare plain numbers, and collections of them, exactly.

Most answers are plain, and math-verify would take ten times as long. A pair is decided here only if both sides are
plain. Plain numbers, which may have a sign and a percent sign, are

    digits, also with separators     `1000`, `1,000`, `1{,}000`, `1\,000`, `1 000`
    decimals, also repeating ones    `12.5`, `.5`, `0.\overline{3}`
    fractions and mixed numbers      `3/4`, `\frac{3}{4}`, `\dfrac34`, `1\frac12`, `1 1/2`
    powers of ten, with a factor     `10^{6}`, `2.5\times10^{-7}`, `2.5e-7`
    collections of plain numbers     points `(1, 2)`, intervals `[0,\frac12)`, sets `\{1,2\}`, lists `1,2`
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_CHARS = 100
"""Longer numbers are left to math-verify."""
FAR_APART = 1000
"""Two nonzero numbers of at most MAX_CHARS characters differ if their exponents of ten are further apart than this."""
DECIMAL_PLACES = 6
"""A nonzero decimal with at least this many places equals an exact value that rounds to it."""

_SPACE = r"(?:\\[,;: ]|\s|~)"
_COMMAS = re.compile(r"\{,\}|\\[,!; ]|,")
_GROUPS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])", re.ASCII)
_SPACED_GROUPS = re.compile(r"([1-9][0-9]{0,2}(?: [0-9]{3})+)(?:\.[0-9]+)?", re.ASCII)
_PERCENT = re.compile(r"\s*(?:\\?%|(?:\\text\{)?\s*(?:percent|percentage|per cent|pct)\s*\}?)\s*$")
_DECIMAL = re.compile(r"([0-9]+)(?:\.([0-9]*))?|\.([0-9]+)", re.ASCII)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{?([0-9]+)\}?", re.ASCII)
_INTEGER = r"\s*(-?\s*[0-9]+)\s*"
_RATIO = re.compile(
    rf"(?:([0-9]+)\s*)??(?:([0-9]+)\s*/\s*([0-9]+)|\\[dtc]?frac\s*(?:\{{{_INTEGER}\}}\s*\{{{_INTEGER}\}}|([0-9])\s*([0-9])))",
    re.ASCII,
)
_EXPONENT = r"(?:\{\s*([+-]?\s*[0-9]+)\s*\}|([+-]?[0-9]+))"
_POWER_OF_TEN = re.compile(
    rf"(?:(.+?){_SPACE}*(?:\\times|\\cdot|\*|×){_SPACE}*)?10\s*\^\s*{_EXPONENT}", re.ASCII | re.DOTALL
)
_E_NOTATION = re.compile(r"([0-9.,]+)[eE]([+-]?[0-9]+)", re.ASCII)
_E_WITHIN = re.compile(r"(?<![0-9A-Za-z.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]+)(?![0-9A-Za-z_])", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A plain number: value * 10^exponent.

    Attributes:
        value: the number as written; 50 for 50 %.
        exponent: the exponent of the power of ten after `value`; a large power is never multiplied out.
        percent: whether a percent sign follows.
        num_places: decimal places as written (`0.50` has 2), since such a value may be rounded; None: it is exact.
    """

    value: Fraction
    exponent: int = 0
    percent: bool = False
    num_places: int | None = None


def same_number(gold: str, answer: str) -> bool | None:
    """Return whether two plain numbers are equal; None if one of them is not a plain number.

    `50\\%` equals both `0.5` and `50`. `0.333333` equals `1/3`, because it has six places; `0.33` does not.
    """
    left, right = plain_number(gold), plain_number(answer)
    if left is None or right is None:
        return None
    if left.percent == right.percent:
        return _agree(left, right)
    # `50%` against `50` or `0.5`
    shares = [
        replace(each, exponent=each.exponent - 2, percent=False) if each.percent else each for each in (left, right)
    ]
    return _agree(left, right) or _agree(*shares)


def plain_number(text: str) -> PlainNumber | None:
    """Return the plain number of a text, or None if it is not one."""
    if len(text) > MAX_CHARS:
        return None
    text = text.strip().replace("\u2212", "-")
    without_percent = _PERCENT.sub("", text)
    percent = without_percent != text
    match = re.fullmatch(r"([+-]?)\s*(.*)", without_percent, re.DOTALL)
    assert match is not None
    sign, digits = match.groups()
    number = _unsigned(digits)
    if number is None:
        return None
    return replace(number, value=-number.value if sign == "-" else number.value, percent=percent)


def e_as_power(text: str) -> str:
    r"""Replace `2e-7` by `2\times 10^{-7}` in a formula: math-verify would read `e` as Euler's number."""
    return _E_WITHIN.sub(r"\1\\times 10^{\2}", text)


def _unsigned(text: str) -> PlainNumber | None:
    power = _POWER_OF_TEN.fullmatch(text)
    if power is not None:
        factor = PlainNumber(Fraction(1)) if power[1] is None else _unsigned(power[1])
        return None if factor is None else _times_power(factor, power[2] or power[3])
    power = _E_NOTATION.fullmatch(text)
    if power is not None:
        factor = _decimal(power[1])
        return None if factor is None else _times_power(factor, power[2])
    decimal = _decimal(text)
    if decimal is not None:
        return decimal
    repeating = _REPEATING.fullmatch(text)
    if repeating is not None:
        whole, places, period = repeating.groups()
        head = Fraction(int(whole + places or "0"), 10 ** len(places))
        return PlainNumber(head + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(places)))
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    whole, *parts = ratio.groups()
    over, under = (int("".join(part.split())) for part in parts if part is not None)
    # it has no value, or is a mixed number with a sign inside
    if under == 0 or (whole is not None and (over < 0 or under < 0)):
        return None
    return PlainNumber(int(whole or 0) + Fraction(over, under))


def _times_power(factor: PlainNumber, exponent: str) -> PlainNumber:
    return replace(factor, exponent=factor.exponent + int("".join(exponent.split())))


def _decimal(text: str) -> PlainNumber | None:
    if _SPACED_GROUPS.fullmatch(text) is not None:
        text = text.replace(" ", "")
    grouped = _COMMAS.sub(",", text)
    if "," in grouped:
        whole, _, places = grouped.partition(".")
        # `1,2` is a list
        if _GROUPS.fullmatch(whole) is None:
            return None
        text = whole.replace(",", "") + (f".{places}" if places else "")
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    places = match[2] or match[3] or ""
    value = Fraction(int((match[1] or "") + places), 10 ** len(places))
    return PlainNumber(value, num_places=len(places) or None)


def _agree(left: PlainNumber, right: PlainNumber) -> bool:
    # 0 is 0 at every power of ten
    if left.value == 0 or right.value == 0:
        return left.value == right.value
    # multiplying such a power out could take all memory
    if abs(left.exponent - right.exponent) > FAR_APART:
        return False
    if left.value * Fraction(10) ** (left.exponent - right.exponent) == right.value:
        return True
    # a long decimal agrees with a value that is no decimal, rounded to its places
    decimal, other = (left, right) if right.num_places is None else (right, left)
    places = decimal.num_places
    if places is None or places < DECIMAL_PLACES or other.num_places is not None:
        return False
    return round(other.value * Fraction(10) ** (other.exponent - decimal.exponent), places) == decimal.value


_BRACKETS = re.compile(r"(?:\\left)?\s*(\(|\[|\\\{)(.*?)(?:\\right)?\s*(\)|\]|\\\})", re.DOTALL)
_MAYBE_THOUSANDS = re.compile(r"[0-9],[0-9]{3}(?![0-9])")


def same_collection(gold: str, answer: str) -> bool | None:
    """Return whether two collections are equal; None unless both hold plain numbers in the same brackets.

    Order and repetitions do not matter in sets and in lists without brackets.
    """
    left, right = _parts(gold), _parts(answer)
    if left is None or right is None or left[0] != right[0]:
        return None
    golds, answers = left[1], right[1]
    if left[0] in ("", r"\{\}"):
        each_way = ((golds, answers), (answers, golds))
        return all(any(same_number(one, other) for other in others) for parts, others in each_way for one in parts)
    return len(golds) == len(answers) and all(map(same_number, golds, answers))


def _parts(text: str) -> tuple[str, list[str]] | None:
    match = _BRACKETS.fullmatch(text)
    brackets, inner = (match[1] + match[3], match[2]) if match else ("", text)
    parts = inner.split(",")
    # `1,000` may be one number
    if len(parts) < 2 or _MAYBE_THOUSANDS.search(inner) or any(plain_number(part) is None for part in parts):
        return None
    return brackets, parts
