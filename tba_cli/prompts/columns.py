"""Turn a row of a data set into a prompt.

native    the row has the columns prompt_id, task, text, data, split of a prompt; an absent split is `train`
mapped    the row has another shape: one task for all, text from a column or a template, data from columns (whole, or
          after a marker, in a box, at a JSON key), an id from a column or from the content, a rule that holds some out
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from tba.api import Prompt, Split
from tba.config.data import ColumnValue
from tba.errors import ConfigError

NATIVE_COLUMNS = ("prompt_id", "task", "text", "data", "split")
ID_DIGITS = 20
"""Hex digits (80 bits) of a content digest in a prompt id."""
BOXES = ("\\boxed", "\\fbox")


class RowError(Exception):
    """A row cannot become a prompt; names the column and the value."""


def native_prompt(values: Mapping[str, Any], *, null_is_absent: bool) -> Prompt:
    """Return a prompt from columns with the names of its fields. `data` may also be the text of a JSON object.

    Args:
        values: the row.
        null_is_absent: treat null as absent; in a table every row has every column, and every struct every key.

    Raises:
        RowError: a column is missing, unknown, or has a wrong value.
    """
    # Parquet has a value for every column in every row; JSON Lines may leave one out
    given = _without_nulls(values) if null_is_absent else dict(values)
    data = given.get("data")
    if isinstance(data, str):
        try:
            given["data"] = from_json(data)
        except ValueError as error:
            raise RowError(f"data: {short(data)} is not JSON: {error}") from None
    elif isinstance(data, dict):
        given["data"] = plain("data", _without_nulls(data) if null_is_absent else data)
    return validated(given)


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The text is the value of one column."""

    name: str

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        return [self.name]

    def text_of(self, values: Mapping[str, Any]) -> str:
        """Return the text of a row. Raises RowError where the column is absent or not text."""
        value = column(values, self.name)
        if not isinstance(value, str):
            raise RowError(f"column {self.name!r}: {short(value)} is not text{_chat_hint(value)}")
        return value


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, as in chat data sets: [{"role", "content"}, ...]."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def messages(where: str, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: the content is one text, and what is null is left out.

    Raises:
        RowError: a content is absent, or a part of it is no text.
    """
    found = []
    for number, message in enumerate(value, start=1):
        place = f"{where}, message {number} ({message['role']})"
        given = {name: part for name, part in message.items() if part is not None}
        content = given.get("content")
        if isinstance(content, list):
            given["content"] = "".join(_part_text(place, part) for part in content)
        elif content is None and given.get("tool_calls"):
            given["content"] = None  # as in the format of OpenAI: the calls are what the model said
        elif not isinstance(content, str):
            raise RowError(f"{place}: its content {short(content)} is not text; give it one, or leave the row out")
        found.append(plain(place, given))
    return found


def _part_text(place: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise RowError(f"{place}: the part {short(part)} of its content is not text; leave it or the row out")
    return text


def _chat_hint(value: Any) -> str:
    return "; messages need a model, whose chat template makes text of them: give column in a recipe" * is_chat(value)


class TextTemplate:
    """The text is a template, for example "Q: {question}\\nA:"; {{ and }} stand for braces.

    Args:
        template: the text.
        where: its name in errors: a flag, or a key of the recipe.

    Raises:
        ConfigError: it is not a template, names no column, or asks for formatting.
    """

    def __init__(self, template: str, *, where: str = "--text-template") -> None:
        try:
            self._parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ConfigError(f"{where} {template!r}: {error}; {{{{ and }}}} stand for braces") from None
        for _, name, spec, conversion in self._parts:
            # formatting would depend on types, which differ from file to file
            if name is not None and (not name or spec or conversion):
                raise ConfigError(f"{where} {template!r}: a column is named as {{name}}, without formatting")
        self.columns = list(dict.fromkeys(name for _, name, _, _ in self._parts if name))
        if not self.columns:
            raise ConfigError(f"{where} {template!r} names no column, so the text of every row would be the same")

    def text_of(self, values: Mapping[str, Any]) -> str:
        """Return the text of a row. Raises RowError where a column is absent or neither text nor a number."""
        return "".join(literal + (column_text(values, name) if name else "") for literal, name, _, _ in self._parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The meaning of the columns, for rows of another shape.

    `data` gives the column of each key of the prompt's data. Without `id_column` the id is a digest of task, text and
    data, so the same row is the same prompt wherever it stands; `id_prefix` (by default the task) is before it.
    """

    task: str
    text: TextColumn | TextTemplate
    id_column: str | None = None
    id_prefix: str | None = None
    data: Mapping[str, ColumnValue] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        ids = [] if self.id_column is None else [self.id_column]
        return list(dict.fromkeys([*ids, *self.text.columns, *(rule.column for rule in self.data.values())]))

    def prompt(self, values: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a row, in the split `train`.

        Raises:
            RowError: a column is absent or has a wrong value.
        """
        text = self.text.text_of(values)
        data = {key: data_value(rule, values) for key, rule in self.data.items()}
        if self.id_column is None:
            # sorted: the order of the columns must not change an id
            content = json.dumps([self.task, text, data], sort_keys=True)
            prompt_id = f"{self.id_prefix or self.task}-{hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]}"
        else:
            prompt_id = column_text(values, self.id_column)
        return validated({"prompt_id": prompt_id, "task": self.task, "text": text, "data": data})


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The rule that holds prompts of a mapped data set out, by the digest of the id, so that no order matters.

    At most one of: all prompts in one `split`; one of every `heldout_every`; `num_heldout` of them.
    """

    split: Split = "train"
    heldout_every: int | None = None
    num_heldout: int | None = None

    def chosen(self, prompt_ids: Iterable[str]) -> frozenset[str]:
        """Return the `num_heldout` ids with the smallest digests; none where the rule is another one.

        Raises:
            ConfigError: there are not that many, or they would be all.
        """
        if self.num_heldout is None:
            return frozenset()
        different = set(prompt_ids)
        # ids that come twice are one prompt
        if self.num_heldout >= len(different):
            raise ConfigError(
                f"num_heldout {self.num_heldout} of {len(different)} prompts leaves none to train on; hold out fewer"
            )
        # by digest: more rows later leave most of the held-out prompts as they are
        return frozenset(heapq.nsmallest(self.num_heldout, different, key=_digest))

    def split_of(self, prompt_id: str, chosen: frozenset[str]) -> Split:
        """Return the split of one prompt; `chosen` is the result of the method `chosen` for all prompts."""
        if self.heldout_every is not None:
            return "heldout" if _digest(prompt_id) % self.heldout_every == 0 else "train"
        return "heldout" if prompt_id in chosen else self.split


def column(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or at a path into nested ones, such as `reward_model.ground_truth`.

    Raises:
        RowError: the row does not have it.
    """
    # a name may have dots of its own
    value, place = values, "this row"
    for part in [name] if name in values else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = f"has {', '.join(map(str, value)) or 'none'}" if isinstance(value, Mapping) else f"is {short(value)}"
            raise RowError(f"column {name!r} is missing; {place} {has}")
        value, place = value[part], f"its {part!r}"
    return value


def stored_columns(names: Iterable[str], known: Sequence[str] | None) -> list[str]:
    """Return the columns of a source that hold these: `a.b` lies in `a` where no column has that name.

    Args:
        known: the columns of the source; None: every row has its own.
    """
    whole = (name if known is None or name in known else name.partition(".")[0] for name in names)
    return list(dict.fromkeys(whole))


def data_value(rule: ColumnValue, values: Mapping[str, Any]) -> Any:
    """Return the value that a rule takes from a row. Raises RowError where the row does not have it."""
    return plain(f"column {rule.column!r}", extracted(rule, column(values, rule.column)))


def plain(where: str, value: Any) -> Any:
    """Return the value, which must be JSON. Raises RowError that names the part that is not."""
    if isinstance(value, dict):
        return {_key(where, key): plain(where, child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain(where, child) for child in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise RowError(f"{where}: {short(value)} ({type(value).__name__}) is not JSON; make it text or a number first")


def short(value: Any) -> str:
    """Return a value as errors show it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _key(where: str, key: Any) -> str:
    if not isinstance(key, str):
        raise RowError(f"{where}: the key {short(key)} is not text, as JSON needs it")
    return key


def column_text(values: Mapping[str, Any], name: str) -> str:
    """Return a column as text. Raises RowError where it is absent or neither text nor a number."""
    value = column(values, name)
    # True is an int in Python, and "True" no text that anyone meant
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"column {name!r}: {short(value)} is neither text nor a number")
    # a table of numbers has NaN where a value is absent, and "nan" would be learned
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"column {name!r}: {value} is no number; leave the row out of the data set")
    return str(value)


Gold = Mapping[str, Collection[str]]
"""Task -> the keys of a prompt's data in which its gold answer is."""


def check_gold(prompt: Prompt, gold: Gold) -> None:
    """Refuse a prompt without a gold answer: each of its rollouts would be generated, and have no score.

    Raises:
        RowError: an answer is absent, null or empty.
    """
    for key in gold.get(prompt.task, ()):
        value = prompt.data.get(key)
        answers = value if isinstance(value, list) and value else [value]
        if any(answer in (None, []) or (isinstance(answer, str) and not answer.strip()) for answer in answers):
            raise RowError(
                f"data.{key}: {short(value)} is no gold answer, which task {prompt.task!r} needs; correct it, or leave "
                "the row out"
            )


def _digest(prompt_id: str) -> int:
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")


def validated(values: dict[str, Any]) -> Prompt:
    """Return a prompt of these fields. Raises RowError that names the field and the value."""
    try:
        return Prompt.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f": {short(first['input'])}"
        raise RowError(f"{key}{value}: {first['msg']}") from None


def extracted(rule: ColumnValue, value: Any) -> Any:
    """Return what the rule takes from the value of its column.

    Raises:
        RowError: the value does not have it.
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
    # the last marker: solutions name the marker in their text too, before the answer
    _, found, rest = value.rpartition(rule.marker)
    if not found or not rest.strip():
        raise RowError(f"column {rule.column!r}: {short(value)} holds no answer after {rule.marker!r}")
    return rest.strip()


def _boxed(text: str, column: str) -> str:
    """Return the content of the last box."""
    start = max(text.rfind(box) for box in BOXES)
    if start < 0:
        raise RowError(f"column {column!r}: {short(text)} holds no \\boxed{{...}}")
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    # MATH also writes `\boxed 7` without braces: then the answer is the next word
    answer = _braced(rest) if rest.startswith("{") else rest.partition("$")[0].split(" ")[0]
    if answer is None or not answer.strip():
        raise RowError(f"column {column!r}: the last \\boxed of {short(text)} is empty, or its brace is never closed")
    return answer.strip()


def _braced(text: str) -> str | None:
    """Return the text between the first brace and the one that closes it, or None where none does."""
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


def _json_value(text: str, key: str, column: str) -> Any:
    """Return the value at a key; if it is a list with one item, that item."""
    try:
        document = from_json(text)
    except ValueError as error:
        raise RowError(f"column {column!r}: {short(text)} is not JSON: {error}") from None
    if not isinstance(document, dict) or key not in document:
        raise RowError(f"column {column!r}: {short(text)} has no key {key!r}")
    value = document[key]
    return value[0] if isinstance(value, list) and len(value) == 1 else value
