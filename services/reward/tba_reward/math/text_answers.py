r"""Answers that are not mathematics: words and letters, times of day, numbers in another base.

math-verify would read `silent` and `listen` as the same product of letters, `12:00` as a division by zero, and `101_3`
as 101. Here words are compared as words, times as times, and numbers with their base.
"""

from __future__ import annotations

import re
from collections.abc import Set

from tba_reward.math.units import is_unit_word, words_of

_FONT = re.compile(r"\\(text|textbf|textrm|textit|mbox|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
_BARE_WORDS = re.compile(r"[^\W\d_][^\d_\\{}$=+*/^<>|%]*")
_SIGNS = re.compile(r"[+*/^<>=|]")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?:([ap])m)?", re.ASCII)
_COMMAND = re.compile(r"\\(?!text|mbox|mathrm|mathbf|mathsf)[A-Za-z]+\*?(?:\s*\{[a-z]*matrix\*?\})?")
_FONT_NAME = re.compile(r"\\(?:text|mbox|mathrm|mathbf|mathsf)[a-z]*")
_WORD = re.compile(r"[^\W\d_]+")
_AFTER_NUMBER = re.compile(
    r"[^A-Za-z]*[0-9}](?:\s*\\(?:text|mbox|mathrm)\s*\{([^{}0-9]*)\}|((?: [a-z]+){1,3}))", re.ASCII
)
_NO_MATHEMATICS = words_of(
    """
    is are was were be been it its he she they we you not no nor if then else when where the this that these
    those so but because thus hence therefore answer equals wrong right correct maybe perhaps either both
    neither should would could can must may about probably approximately
    """
)
_FUNCTIONS = words_of(
    """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm mod det sqrt frac
    dfrac and or infty infinity begin end array cases left right matrix pmatrix bmatrix vmatrix operatorname
    """
)
FILLERS = words_of("any all each total altogether overall left remaining exactly only text square cubic")
"""Words after a number that do not change its value. Others may: `5 lakh`, `3 ninths`."""
MAX_WORDS = 12
"""A gold answer of more words is prose."""
_BASED = re.compile(r"([0-9A-Za-z]+)_(?:\{([0-9]{1,2})\}|([0-9]))", re.ASCII)
_DIGITS = re.compile(r"[0-9A-Fa-f]+", re.ASCII)


def same_words(gold: str, answer: str) -> bool | None:
    """Return whether two answers have the same words; None if neither is words, or if only mathematical signs differ.

    Letters and digits count; case, fonts, spaces and punctuation do not.
    """
    if not (is_words(gold) or is_words(answer)):
        return None
    same = _letters(gold) == _letters(answer)
    # the same letters with other signs between them may be another formula
    return None if same and _SIGNS.findall(gold) != _SIGNS.findall(answer) else same


def same_time_of_day(gold: str, answer: str) -> bool | None:
    """Return whether two times of day (`10:30`, `10:30 a.m.`) are the same; None unless both are times of day.

    A time without am or pm equals the same time with either.
    """
    left, right = _CLOCK.fullmatch(_clock_text(gold)), _CLOCK.fullmatch(_clock_text(answer))
    if left is None or right is None:
        return None
    # a side without am or pm has the other side's
    same_half = left[3] is None or right[3] is None or left[3] == right[3]
    return same_half and (int(left[1]), left[2]) == (int(right[1]), right[2])


def same_in_base(gold: str, answer: str) -> bool | None:
    """Return whether two numbers have the same digits and base (`101_2`); None for other texts or without any base.

    A number without a base has the base of the other.
    """
    left, right = _based(gold), _based(answer)
    if left is None or right is None or (left[1] is None and right[1] is None):
        return None
    return left[0] == right[0] and (left[1] is None or right[1] is None or left[1] == right[1])


def is_words(text: str) -> bool:
    r"""Return whether a text is an answer in words: all of it in a font such as `\text{...}`, or bare and with a word.

    A bare word has 4 or more letters. `\text{12 cm}` has a number, so it is not words. `\mathrm{e}` is a constant.
    """
    outside, fonts = _FONT.subn("", text)
    if fonts:
        inside = "".join(match[2] for match in _FONT.finditer(text))
        one_symbol = len(inside.strip()) == 1 and all(match[1] != "text" for match in _FONT.finditer(text))
        nothing_else = not outside.strip(" ,.;:()~\\")
        return nothing_else and not one_symbol and _BARE_WORDS.fullmatch(inside.strip(" ()")) is not None
    return _BARE_WORDS.fullmatch(text) is not None and _LONG_WORD.search(text) is not None


def is_prose(text: str, gold: str | None = None) -> bool:
    r"""Return whether a text has words in it that are neither units nor mathematics (`4 \text{ is wrong}`).

    Args:
        gold: the gold answer, whose words an answer may use. None: the text is a gold answer itself, and more than
            MAX_WORDS words are prose.
    """
    if is_words(text) or (gold is None and _BARE_WORDS.fullmatch(text)):  # a gold `No` is an answer, not a sentence
        return gold is None and len(text.split()) > MAX_WORDS
    known = set(_WORD.findall(gold.lower())) if gold is not None else set()
    upright = {word for match in _FONT.finditer(text) for word in _WORD.findall(match[2])}
    for word in _WORD.findall(_FONT_NAME.sub(" ", _COMMAND.sub(" ", text))):
        small = word.lower()
        if small in known or small in _FUNCTIONS or is_unit_word(word) or (word.isupper() and word not in upright):
            continue  # capital letters are points (`ABCD`)
        if small in _NO_MATHEMATICS or len(word) >= 4 or (word in upright and len(word) > 1):
            return True
    return False


def words_after_number(gold: str) -> Set[str]:
    """Return the words after a gold answer's number, in lower case. They name what it counts; prose gives none."""
    match = _AFTER_NUMBER.fullmatch(gold)
    words = _WORD.findall((match[1] or match[2] or "").lower()) if match is not None else []
    half_of_day = {"am", "pm", "m", "p"} if ":" in gold else {"am", "pm"}  # `5 m` are metres, `10:30 p m` is a time
    if len(words) > 3 or not (_NO_MATHEMATICS | {"a", "and", "or"} | half_of_day).isdisjoint(words):
        return frozenset()
    return frozenset(words)


def _letters(text: str) -> str:
    return "".join(char for char in _FONT.sub(r"\2", text).casefold() if char.isalnum())


def _clock_text(text: str) -> str:
    return re.sub(r"[\s.\\]", "", _FONT.sub(r"\2", text)).lower()


def _based(text: str) -> tuple[str, int | None] | None:
    text = text.replace(" ", "")
    match = _BASED.fullmatch(text)
    if match is not None:
        digits, base = match[1].upper(), int(match[2] or match[3])
        # letters are digits in a base: `1A` is a number in base 12, but `a_1` is a variable
        is_numeral = base > 1 and all(char.isdigit() or ord(char) - ord("A") + 10 < base for char in digits)
        return (digits, base) if digits.isdigit() or is_numeral else None
    return (text.upper(), None) if _DIGITS.fullmatch(text) else None
