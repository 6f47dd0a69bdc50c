r"""Points, intervals, sets and lists of plain numbers: `(1, 2)`, `[0,\frac12)`, `\{1,2\}`, `1,2`.

math-verify would do, at ten times the time; only what is written alike on both sides is decided here.
"""

from __future__ import annotations

import re

from tba_reward.maths.numbers import plain_number, same_number

_BRACKETS = re.compile(r"(?:\\left)?\s*(\(|\[|\\\{)(.*?)(?:\\right)?\s*(\)|\]|\\\})", re.DOTALL)
_MAYBE_THOUSANDS = re.compile(r"[0-9],[0-9]{3}(?![0-9])")


def same_collection(gold: str, answer: str) -> bool | None:
    """Whether two collections of plain numbers are the same; None unless both are one, with the same brackets.

    Sets and bare lists count in any order and without repetitions.
    """
    left, right = _parts(gold), _parts(answer)
    if left is None or right is None or left[0] != right[0]:
        return None
    golds, answers = left[1], right[1]
    if left[0] in ("", r"\{\}"):
        return _within(golds, answers) and _within(answers, golds)
    return len(golds) == len(answers) and all(map(same_number, golds, answers))


def _within(parts: list[str], others: list[str]) -> bool:
    return all(any(same_number(part, other) for other in others) for part in parts)


def _parts(text: str) -> tuple[str, list[str]] | None:
    match = _BRACKETS.fullmatch(text)
    brackets, inner = (match[1] + match[3], match[2]) if match else ("", text)
    parts = inner.split(",")
    if len(parts) < 2 or _MAYBE_THOUSANDS.search(inner) or any(plain_number(part) is None for part in parts):
        return None
    return brackets, parts
