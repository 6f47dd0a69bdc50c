"""Read the prompts of `[data.train]` and `[data.heldout]`: data sets of the hub's library, or texts of the recipe."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tba.api import Prompt, Split
from tba.config.data import DataSection, DatasetSection
from tba.errors import ConfigError
from tba_cli.prompts.columns import (
    ID_DIGITS,
    Gold,
    RowError,
    TextColumn,
    TextTemplate,
    check_gold,
    data_value,
    stored_columns,
    validated,
)
from tba_cli.prompts.sources import ChatSource, HubSource, Render


@dataclass(frozen=True, slots=True)
class SplitPrompts:
    """The prompts of one split, and how many rows were left out because an earlier row made the same prompt."""

    prompts: list[Prompt]
    num_repeated: int


def dataset_prompts(data: DataSection, render: Render, gold: Gold) -> list[Prompt]:
    """Return the prompts of both splits of a recipe with `[data.train]` and `[data.heldout]`.

    Raises:
        ConfigError: a data set cannot be loaded, or a row is not a prompt (names data set, row, column, value).
    """
    assert data.train is not None, "the recipe was checked"
    assert data.heldout is not None, "the recipe was checked"
    parts = (
        split_prompts(data.train, "train", render, gold),
        split_prompts(data.heldout, "heldout", render, gold),
    )
    return [prompt for part in parts for prompt in part.prompts]


def split_prompts(section: DatasetSection, split: Split, render: Render, gold: Gold) -> SplitPrompts:
    """Return the prompts of one split.

    The id is a digest of task, text and data, and has the name of the held-out split: a text that is in both splits
    (red-teaming has only one prompt) gives two prompts.

    Raises:
        ConfigError: as `dataset_prompts`.
    """
    prompts: dict[str, Prompt] = {}
    num_rows = 0
    for prompt in _rows_as_prompts(section, split, render, gold):
        num_rows += 1
        prompts.setdefault(prompt.prompt_id, prompt)
    if not prompts:
        raise ConfigError(f"data.{split}: {section.dataset} (split {section.split}) holds no rows")
    return SplitPrompts(list(prompts.values()), num_rows - len(prompts))


def _rows_as_prompts(section: DatasetSection, split: Split, render: Render, gold: Gold) -> Iterator[Prompt]:
    """Yield one prompt for every row or text, in order."""
    if section.dataset is not None:
        yield from _dataset_rows(section, split, render, gold)
        return
    for number, text in enumerate(section.texts or [], start=1):
        with _naming(f"data.{split}.texts, item {number}"):
            prompt = _prompt(section.task, text, {}, split)
            check_gold(prompt, gold)
        yield prompt


def _dataset_rows(section: DatasetSection, split: Split, render: Render, gold: Gold) -> Iterator[Prompt]:
    where = f"data.{split}"
    source = HubSource(section.dataset or "", section.split, subset=section.subset, revision=section.revision)
    text = (
        TextColumn(section.column)
        if section.column is not None
        else TextTemplate(section.template or "", where=f"{where}.template")
    )
    wanted = stored_columns([*text.columns, *(rule.column for rule in section.data.values())], source.columns)
    missing = [name for name in wanted if name not in source.columns]
    if missing:
        raise ConfigError(
            f"{where}: {source.name} has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(source.columns)}"
        )
    rows, limit, arguments = source, section.max_prompts, section.chat_template_kwargs
    if section.column is not None:
        rows = ChatSource(source, section.column, render, template_kwargs=arguments, max_rows=limit)
    for row in itertools.islice(rows.rows(wanted), limit):
        with _naming(f"{where}: {source.name}, {row.where}"):
            data = {key: data_value(rule, row.values) for key, rule in section.data.items()}
            prompt = _prompt(section.task, text.text_of(row.values), data, split)
            check_gold(prompt, gold)
        yield prompt


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Add the place of the row to an error about it."""
    try:
        yield
    except RowError as error:
        raise ConfigError(f"{where}: {error}") from None


def _prompt(task: str, text: str, data: dict[str, Any], split: Split) -> Prompt:
    # sorted: the order of the columns must not change an id
    content = json.dumps([task, text, data], sort_keys=True)
    name = task if split == "train" else f"{task}-{split}"
    prompt_id = f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]}"
    return validated({"prompt_id": prompt_id, "task": task, "text": text, "data": data, "split": split})
