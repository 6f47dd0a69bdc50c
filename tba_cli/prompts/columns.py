"""Turn a row of a data set into a prompt.

All rows of a data set have one task. The text comes from a column or a template, and the data from columns (whole,
before or after a marker, in a box, at a JSON key). A column of messages gives a chat, with the tools of the column
`tools` where the row has them, as in data sets for TRL. The id is a digest of task, text and data. Every function here
raises RowError if a row lacks a value or has a wrong one.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from tba.api import Prompt, Split
from tba.config.data import ColumnValue, DataSet
from tba.errors import ConfigError

ID_DIGITS = 20
"""Hex digits (80 bits) of a content digest in a prompt id."""
BOXES = ("\\boxed", "\\fbox")
TOOLS_COLUMN = "tools"


class RowError(Exception):
    """A row cannot become a prompt; the message names the column and the value."""


@dataclass(slots=True)
class Chat:
    """The messages and tools of a row, and the text that the chat template makes of them; empty before it has."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    text: str = ""


def prompt_of(section: DataSet, split: Split, text: str | Chat, values: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a row with this text or chat; the data come from the row's columns."""
    fields: dict[str, Any] = {}
    if isinstance(text, Chat):
        fields = {"messages": text.messages, "tools": text.tools, "chat_template_kwargs": section.chat_template_kwargs}
        text = text.text
    entry = ("question", "answer", "metadata", "options") if section.reasoning_gym else ()
    data = {key: values[key] for key in entry} | {
        key: plain(f"column {rule.column!r}", extracted(rule, column(values, rule.column)))
        for key, rule in section.data.items()
    }
    # sorted: the order of the columns must not change an id
    # two chats of one text: a content of one has what the template writes in the other
    chat = [fields["messages"], fields["tools"]] if fields and "<" in str(fields["messages"]) else []
    content = json.dumps([section.task, text, data, *chat], sort_keys=True)
    # a text that is in both splits gives two prompts
    prefix = section.task if split == "train" else f"{section.task}-{split}"
    prompt_id = f"{prefix}-{hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]}"
    fields |= {"prompt_id": prompt_id, "task": section.task, "text": text, "data": data, "split": split}
    return validated(fields)


def text_of(section: DataSet, values: Mapping[str, Any]) -> str | Chat:
    """Return the text of a row, or its chat, which the chat template has to turn into text."""
    if section.template is not None:
        parts = template_parts(section.template)
        return "".join(literal + (column_text(values, name) if name else "") for literal, name in parts)
    assert section.column is not None, "the recipe was checked"
    value = column(values, section.column)
    # a list of messages, as in chat data sets: [{"role", "content"}, ...]
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return Chat(messages(f"column {section.column!r}", value), _tools(values.get(TOOLS_COLUMN)))
    if not isinstance(value, str):
        raise RowError(f"column {section.column!r}: {short(value)} is not text")
    return value


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Return the parts of a template such as "Q: {question}\\nA:", each as (text, name of the column after it)."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template {template!r}: {error}; {{{{ and }}}} stand for braces") from None
    for _, name, spec, conversion in parts:
        # formatting would depend on types, which differ from file to file
        if name is not None and (not name or spec or conversion):
            raise ConfigError(f"template {template!r}: a column is named as {{name}}, without formatting")
    if not any(name for _, name, _, _ in parts):
        raise ConfigError(f"template {template!r} names no column, so the text of every row would be the same")
    return [(literal, name) for literal, name, _, _ in parts]


def messages(where: str, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without null fields; raise RowError if a content is not text. `where`: the column, for errors."""
    found = []
    for number, message in enumerate(value, start=1):
        place = f"{where}, message {number} ({message['role']})"
        given = {name: part for name, part in message.items() if part is not None}
        content = given.get("content")
        if content is None and given.get("tool_calls"):
            given["content"] = None  # as in the format of OpenAI: the calls are what the model said
        elif not isinstance(content, str):
            raise RowError(f"{place}: its content {short(content)} is not text; give it one, or leave the row out")
        found.append(plain(place, given))
    return found


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row, which may be JSON; a data set of equal columns has nulls where a schema has no key."""
    where = f"column {TOOLS_COLUMN!r}"
    try:
        value = from_json(value) if isinstance(value, str) and value.strip() else value or []
    except ValueError as error:
        raise RowError(f"{where}: {short(value)} is not JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f"{where}: {short(value)} is no list of tools (JSON schemas); correct it, or rename the column")
    return _without_nulls(plain(where, value))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def column(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a path into nested columns such as `reward_model.ground_truth`."""
    # a name may have dots of its own
    value, place = values, "this row"
    for part in [name] if name in values else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = f"has {', '.join(map(str, value)) or 'none'}" if isinstance(value, Mapping) else f"is {short(value)}"
            raise RowError(f"column {name!r} is missing; {place} {has}")
        value, place = value[part], f"its {part!r}"
    return value


def plain(where: str, value: Any) -> Any:
    """Return a value unchanged if it is JSON, else raise RowError. `where`: the column, for the error."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise RowError(f"{where}: the key {short(key)} is not text, as JSON needs it")
        return {key: plain(where, child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain(where, child) for child in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise RowError(f"{where}: {short(value)} ({type(value).__name__}) is not JSON; make it text or a number first")


def short(value: Any) -> str:
    """Return the repr of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def column_text(values: Mapping[str, Any], name: str) -> str:
    """Return a column as text; raise RowError if it is missing, or is neither text nor a finite number."""
    value = column(values, name)
    # True is an int in Python, and "True" no text that anyone meant
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"column {name!r}: {short(value)} is neither text nor a number")
    # a table of numbers has NaN where a value is absent, and "nan" would be learned
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"column {name!r}: {value} is no number; leave the row out of the data set")
    return str(value)


Gold = Mapping[str, Collection[str]]
"""Task -> the keys of a prompt's data that hold its gold answers."""


def check_gold(prompt: Prompt, gold: Gold) -> None:
    """Raise RowError if a prompt has no gold answer, because none of its rollouts could be scored."""
    for key in gold.get(prompt.task, ()):
        value = prompt.data.get(key)
        answers = value if isinstance(value, list) and value else [value]
        if any(answer in (None, []) or (isinstance(answer, str) and not answer.strip()) for answer in answers):
            raise RowError(
                f"data.{key}: {short(value)} is no gold answer, which task {prompt.task!r} needs; correct it, or leave "
                "the row out"
            )


def validated(values: dict[str, Any]) -> Prompt:
    """Return a prompt with these fields; raise RowError with the field and value that are wrong."""
    try:
        return Prompt.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f": {short(first['input'])}"
        raise RowError(f"{key}{value}: {first['msg']}") from None


def extracted(rule: ColumnValue, value: Any) -> Any:
    """Apply a rule to the value of its column: take all, a box, a JSON key, or the text before or after a marker."""
    if rule.extract == "whole":
        return value
    if not isinstance(value, str):
        raise RowError(f"column {rule.column!r}: {short(value)} is not text")
    if rule.extract == "boxed":
        start = max(value.rfind(box) for box in BOXES)
        if start < 0:
            raise RowError(f"column {rule.column!r}: {short(value)} holds no \\boxed{{...}}")
        rest = value[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
        # MATH also writes `\boxed 7` without braces: then the answer is the next word
        answer = _braced(rest) if rest.startswith("{") else rest.partition("$")[0].split(" ")[0]
        if answer is None or not answer.strip():
            raise RowError(
                f"column {rule.column!r}: the last \\boxed of {short(value)} is empty, or its brace is never closed"
            )
        return answer.strip()
    assert rule.marker is not None, "the config asks for a marker"
    if rule.extract == "json":
        try:
            document = from_json(value)
        except ValueError as error:
            raise RowError(f"column {rule.column!r}: {short(value)} is not JSON: {error}") from None
        if not isinstance(document, dict) or rule.marker not in document:
            raise RowError(f"column {rule.column!r}: {short(value)} has no key {rule.marker!r}")
        found = document[rule.marker]
        # a list with one item is that item
        return found[0] if isinstance(found, list) and len(found) == 1 else found
    if rule.extract == "before":
        return value.partition(rule.marker)[0]
    # the last marker: solutions name the marker in their text too, before the answer
    _, marker, rest = value.rpartition(rule.marker)
    if not marker or not rest.strip():
        raise RowError(f"column {rule.column!r}: {short(value)} holds no answer after {rule.marker!r}")
    return rest.strip()


def _braced(text: str) -> str | None:
    """Return the text between the first brace and the brace that closes it, or None if it is never closed."""
    depth, escaped = 0, False
    for index, char in enumerate(text):
        # a brace behind a backslash is a character of the answer, as in \{1, 2\}
        if escaped or char == "\\":
            escaped = not escaped
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[1:index]
    return None
