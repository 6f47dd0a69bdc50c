"""The gold answer in a column of a data set: all of it, or what a marker, a box or a JSON key says."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from tba.config.data import ColumnValue
from tba.local.prompt_columns import RowError, short

BOXES = ("\\boxed", "\\fbox")


def extracted(rule: ColumnValue, value: Any) -> Any:
    """What the rule takes from the value of its column.

    Raises:
        RowError: there is no such thing in it.
    """
    if rule.extract == "whole":
        return value
    if not isinstance(value, str):
        raise RowError(f"column {rule.column!r}: {short(value)} is not text")
    if rule.extract == "boxed":
        return _boxed(value, rule.column)
    assert rule.marker is not None, "the config asks for a marker"
    if rule.extract == "json":
        return _json_value(value, rule.marker, rule.column)
    if rule.extract == "before":
        return value.partition(rule.marker)[0]
    _, found, rest = value.rpartition(rule.marker)
    if not found or not rest.strip():
        raise RowError(f"column {rule.column!r}: {short(value)} holds no answer after {rule.marker!r}")
    return rest.strip()


def _boxed(text: str, column: str) -> str:
    """The content of the last box. MATH also writes `\\boxed 7` without braces: then it is the next word."""
    start = max(text.rfind(box) for box in BOXES)
    if start < 0:
        raise RowError(f"column {column!r}: {short(text)} holds no \\boxed{{...}}")
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    answer = _braced(rest) if rest.startswith("{") else rest.partition("$")[0].split(" ")[0]
    if answer is None or not answer.strip():
        raise RowError(f"column {column!r}: the last \\boxed of {short(text)} is empty, or its brace is never closed")
    return answer.strip()


def _braced(text: str) -> str | None:
    """What is between the brace that the text begins with and the one that closes it; None: there is no such brace."""
    depth, escaped = 0, False
    for index, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[1:index]
    return None


def _json_value(text: str, key: str, column: str) -> Any:
    """The value at a key; of a list with one item, that item."""
    try:
        document = from_json(text)
    except ValueError as error:
        raise RowError(f"column {column!r}: {short(text)} is not JSON: {error}") from None
    if not isinstance(document, dict) or key not in document:
        raise RowError(f"column {column!r}: {short(text)} has no key {key!r}")
    value = document[key]
    return value[0] if isinstance(value, list) and len(value) == 1 else value
