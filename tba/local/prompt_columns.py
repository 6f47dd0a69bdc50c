"""From a row of a data set to a prompt: which column is what, and which rows are held out.

native    the columns prompt_id, task, text, data, split of the row are the prompt's; an absent split is `train`
mapped    a recipe for rows of another shape: one task for all, text from a column or a template, data from columns,
          an id from a column or from the content, and a rule that holds some out
"""

from __future__ import annotations

import hashlib
import heapq
import json
import string
from collections.abc import Iterable, Mapping
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


class RowError(Exception):
    """A row cannot become a prompt: names the column and the value."""


def native_prompt(values: Mapping[str, Any], *, null_is_absent: bool) -> Prompt:
    """A prompt from the columns that bear the names of its fields. `data` may also be the text of a JSON object.

    Args:
        values: the row.
        null_is_absent: in a table every row has every column, and every struct every key: null where there is nothing.

    Raises:
        RowError: a column is missing, unknown, or has a wrong value.
    """
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
        """The columns it reads."""
        return [self.name]

    def text_of(self, values: Mapping[str, Any]) -> str:
        """The text of a row. Raises RowError when the column is absent or not text."""
        value = column(values, self.name)
        if not isinstance(value, str):
            raise RowError(f"column {self.name!r}: {short(value)} is not text{_chat_hint(value)}")
        return value


def is_chat(value: Any) -> bool:
    """Whether a value is messages, as chat data sets have them: [{"role", "content"}, ...]."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _chat_hint(value: Any) -> str:
    return "; messages need a model, whose chat template makes text of them: give column in a recipe" * is_chat(value)


class TextTemplate:
    """The text is a template, for example "Q: {question}\\nA:"; {{ and }} stand for braces.

    Args:
        template: the text.
        where: what errors call it: a flag, or a key of the recipe.

    Raises:
        ConfigError: it is not a template, names no column, or asks for formatting.
    """

    def __init__(self, template: str, *, where: str = "--text-template") -> None:
        try:
            self._parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ConfigError(f"{where} {template!r}: {error}; {{{{ and }}}} stand for braces") from None
        for _, name, spec, conversion in self._parts:
            if name is not None and (not name or spec or conversion):
                raise ConfigError(f"{where} {template!r}: a column is named as {{name}}, without formatting")
        self.columns = list(dict.fromkeys(name for _, name, _, _ in self._parts if name))
        if not self.columns:
            raise ConfigError(f"{where} {template!r} names no column, so every prompt would be the same")

    def text_of(self, values: Mapping[str, Any]) -> str:
        """The text of a row. Raises RowError when a column is absent or neither text nor a number."""
        return "".join(literal + (_text(values, name) if name else "") for literal, name, _, _ in self._parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column is what, for rows of another shape.

    `data` says from which column each key of the prompt's data comes; without `id_column` the id is a digest of task,
    text and data, so the same row is the same prompt wherever it stands.
    """

    task: str
    text: TextColumn | TextTemplate
    id_column: str | None = None
    data: Mapping[str, ColumnValue] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        ids = [] if self.id_column is None else [self.id_column]
        return list(dict.fromkeys([*ids, *self.text.columns, *(rule.column for rule in self.data.values())]))

    def prompt(self, values: Mapping[str, Any]) -> Prompt:
        """The prompt of a row, in the split `train`.

        Raises:
            RowError: a column is absent or has a wrong value.
        """
        text = self.text.text_of(values)
        data = {key: data_value(rule, values) for key, rule in self.data.items()}
        if self.id_column is None:
            content = json.dumps([self.task, text, data], sort_keys=True)
            prompt_id = f"{self.task}-{hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]}"
        else:
            prompt_id = _text(values, self.id_column)
        return validated({"prompt_id": prompt_id, "task": self.task, "text": text, "data": data})


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Which prompts of a mapped data set are held out; by the digest of the id, so it depends on no order.

    At most one of: all prompts in one `split`; one of every `heldout_every`; `num_heldout` of them.
    """

    split: Split = "train"
    heldout_every: int | None = None
    num_heldout: int | None = None

    def chosen(self, prompt_ids: Iterable[str]) -> frozenset[str]:
        """The `num_heldout` ids with the smallest digests; none where the rule is another one.

        Raises:
            ConfigError: there are not that many, or they would be all.
        """
        if self.num_heldout is None:
            return frozenset()
        different = set(prompt_ids)
        if self.num_heldout >= len(different):
            raise ConfigError(
                f"num_heldout {self.num_heldout} of {len(different)} prompts leaves none to train on; hold out fewer"
            )
        return frozenset(heapq.nsmallest(self.num_heldout, different, key=_digest))

    def split_of(self, prompt_id: str, chosen: frozenset[str]) -> Split:
        """The split of one prompt; `chosen` is what `chosen` answered for all."""
        if self.heldout_every is not None:
            return "heldout" if _digest(prompt_id) % self.heldout_every == 0 else "train"
        return "heldout" if prompt_id in chosen else self.split


def column(values: Mapping[str, Any], name: str) -> Any:
    """The value of a column. Raises RowError when the row has no such column."""
    if name not in values:
        raise RowError(f"column {name!r} is missing; this row has {', '.join(values) or 'none'}")
    return values[name]


def data_value(rule: ColumnValue, values: Mapping[str, Any]) -> Any:
    """What a rule takes from a row. Raises RowError when there is no such thing in it."""
    from tba.local.extraction import extracted  # it has RowError from here

    return plain(f"column {rule.column!r}", extracted(rule, column(values, rule.column)))


def plain(where: str, value: Any) -> Any:
    """The value, which must be JSON. Raises RowError naming the part that is not."""
    if isinstance(value, dict):
        return {_key(where, key): plain(where, child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain(where, child) for child in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise RowError(f"{where}: {short(value)} ({type(value).__name__}) is not JSON; make it text or a number first")


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _key(where: str, key: Any) -> str:
    if not isinstance(key, str):
        raise RowError(f"{where}: the key {short(key)} is not text, as JSON needs it")
    return key


def _text(values: Mapping[str, Any], name: str) -> str:
    value = column(values, name)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowError(f"column {name!r}: {short(value)} is neither text nor a number")
    return str(value)


def _digest(prompt_id: str) -> int:
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")


def validated(values: dict[str, Any]) -> Prompt:
    """A prompt of these fields. Raises RowError naming the field and the value."""
    try:
        return Prompt.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f": {short(first['input'])}"
        raise RowError(f"{key}{value}: {first['msg']}") from None
