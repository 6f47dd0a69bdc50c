"""Explain why bytes were refused: the field, what was expected there, and its value.

msgspec names the path and the expectation; the value is read from the plain document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tba.errors import LimitError, MalformedError, SchemaVersionError, WireError

_ABSENT = re.compile(r"Object (missing required|contains unknown) field `(.*?)`(?: - at `(.*)`)?", re.S)
_EXPECTED = re.compile(r"(?:Expected (.+?)(?:, got `?\w+`?)?|Invalid enum value .*?)(?: - at `(.*)`)?", re.S)
_KEY = re.compile(r"Expected `str`, got `\w+` - at `key` in `(.*)`", re.S)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def validation_error(
    data: bytes, error: BaseException, *, what: str, schema: int, choices: Mapping[str, tuple[str, ...]]
) -> WireError:
    """Return the error for bytes that a msgspec decoder refused.

    Args:
        data: the bytes.
        error: what the decoder raised.
        what: the name of the expected document.
        schema: the schema number that this build reads.
        choices: path -> the texts allowed there.
    """
    try:
        document: Any = msgspec.msgpack.decode(data)
    except (ValueError, TypeError, MemoryError, RecursionError) as reason:  # TypeError: a key that cannot be hashed
        return MalformedError(f"{what}: the body is not one valid msgpack document ({reason})")
    if not isinstance(document, dict):
        return MalformedError(f"{what}: expected a msgpack map, got {type(document).__name__}")
    # before the fields: another schema number explains every field that differs
    found_schema = document.get("schema")
    if type(found_schema) is int and found_schema != schema:
        return SchemaVersionError(
            f"{what}: schema {found_schema} is not one this build reads ({schema}); "
            "run the same tba release on every service"
        )
    rollout_id = document.get("rollout_id")
    # one push holds many rollouts: the id tells the sender which one
    if isinstance(rollout_id, bytes) and len(rollout_id) == 16:
        what = f"{what} {rollout_id.hex()}"
    return _field_error(document, str(error), what, choices)


def shorten(value: object) -> str:
    """Return a value for an error message, at most 60 characters of it."""
    if isinstance(value, msgspec.msgpack.Ext):
        return f"extension {value.code}"
    text = repr(value[:60] if isinstance(value, bytes | str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _field_error(document: Any, text: str, what: str, choices: Mapping[str, tuple[str, ...]]) -> WireError:
    if (absent := _ABSENT.fullmatch(text)) is not None:
        problem, name, path = absent.groups()
        name = ".".join([*_path_steps(path), name])
        return MalformedError(
            f"{what}: field {name!r} is missing"
            if problem.startswith("missing")
            else f"{what}: unknown field(s) {name}"
        )
    if (key := _KEY.fullmatch(text)) is not None:
        where = ".".join(_path_steps(key[1])) or what
        return MalformedError(f"{what}: every key of {where} must be str")
    # msgspec may word an error otherwise some day: then its own text is better than nothing
    if (expected := _EXPECTED.fullmatch(text)) is None:
        return MalformedError(f"{what}: {text}")
    kind, path = expected.groups()
    steps = _path_steps(path)
    name, value = ".".join(steps), _look_up(document, steps)
    if kind is None:
        allowed = ", ".join(choices.get(name, ("something else",)))
        return MalformedError(f"{what}: field {name!r} is {shorten(value)}, not one of {allowed}")
    if "length <=" in kind:
        return LimitError(f"{what}: field {name!r} must be {kind.replace('`', '')}, got {len(value)}")
    size = f" of length {len(value)}" if "length" in kind else ""
    return MalformedError(
        f"{what}: field {name!r} must be {kind.replace('`', '')}, got {type(value).__name__}{size} ({shorten(value)})"
    )


def _path_steps(path: str | None) -> list[str]:
    return [name or number for name, number in _STEP.findall(path or "")]


def _look_up(document: Any, steps: list[str]) -> Any:
    """Return the value at a path, or the innermost one that exists."""
    for step in steps:
        try:
            document = document[int(step) if isinstance(document, list) else step]
        except (KeyError, IndexError, TypeError, ValueError):
            break
    return document
