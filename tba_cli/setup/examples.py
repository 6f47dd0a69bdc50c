"""Make the examples of supervised training from the rows of a data set: texts from templates with columns in them.

{"prompt", "response"}               [[sft]]
{"prompt", "chosen", "rejected"}     [[reward_training]], pairs
{"prompt", "response", "label"}      [[reward_training]], labels
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.config.supervised import RewardTrainingSection, SftSection, SupervisedItem
from tba.errors import ConfigError
from tba.weights import sha256_of_file
from tba_cli.prompts.columns import RowError, TextTemplate, column_text, short, stored_columns
from tba_cli.prompts.sources import Source, open_dataset


@dataclass(frozen=True, slots=True)
class ExampleFiles:
    """The files of an item, and their number of rows."""

    train: Path
    heldout: Path | None
    num_train: int
    num_heldout: int

    @property
    def sha256(self) -> str:
        """Digest of the examples to train on, as the report of a training has it."""
        return sha256_of_file(self.train)


class ExampleForm:
    """The way from a row to an example.

    Args:
        item: of the recipe.
        key: its place there, such as `sft.0`, for errors.

    Raises:
        ConfigError: a text is not a template.
    """

    def __init__(self, item: SupervisedItem, key: str) -> None:
        names = ("response",) if isinstance(item, SftSection) or not item.is_pairs else ("chosen", "rejected")
        # a prompt may be the same for all, as in red-teaming
        self._texts = {"prompt": TextTemplate(item.prompt, where=f"{key}.prompt", may_be_fixed=True)}
        self._texts |= {name: TextTemplate(getattr(item, name), where=f"{key}.{name}") for name in names}
        is_pairs = isinstance(item, RewardTrainingSection) and item.is_pairs
        self._label = None if isinstance(item, SftSection) or is_pairs else item.label
        self._labels = [] if isinstance(item, SftSection) else item.labels or []
        self._key = key

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        found = [name for text in self._texts.values() for name in text.columns]
        return list(dict.fromkeys([*found, *([] if self._label is None else [self._label])]))

    def example(self, values: Mapping[str, object]) -> dict[str, str]:
        """Return the example of a row.

        Raises:
            RowError: a column is absent or has a wrong value, a text is empty, or the label is none of `labels`.
        """
        found = {name: text.text_of(values) for name, text in self._texts.items()}
        for name, text in found.items():
            # a prompt without columns is what the recipe says
            if not text.strip() and self._texts[name].columns:
                columns = ", ".join(map(repr, self._texts[name].columns))
                raise RowError(f"the {name}, of column {columns}, is empty; leave the row out of the data set")
        if self._label is not None:
            found["label"] = column_text(values, self._label)
            if found["label"] not in self._labels:
                raise RowError(
                    f"column {self._label!r}: {short(found['label'])} is none of {self._key}.labels "
                    f"({', '.join(self._labels)}); add it there, or leave the row out of the data set"
                )
        return found


def write_examples(item: SupervisedItem, key: str, folder: Path) -> ExampleFiles:
    """Write the examples of an item to JSONL files in `folder`.

    Args:
        key: place of the item in the recipe, such as `sft.0`, for errors.

    Raises:
        ConfigError: a data set cannot be read or is empty, or a row is no example (names data set, row and column).
    """
    form = ExampleForm(item, key)
    if item.dataset.endswith((".jsonl", ".parquet")) and (item.split != "train" or item.heldout_split is not None):
        raise ConfigError(
            f"{key}: {item.dataset} is a file, which has no splits; remove split and heldout_split, or give a data set "
            "with splits"
        )
    train, heldout = folder / "train.jsonl", None if item.heldout_split is None else folder / "heldout.jsonl"
    num_train = _write(form, _source(item, key, item.split, form), key, train)
    num_heldout = 0
    if heldout is not None:
        num_heldout = _write(form, _source(item, key, item.heldout_split or "", form), key, heldout)
    return ExampleFiles(train, heldout, num_train, num_heldout)


def _source(item: SupervisedItem, key: str, split: str, form: ExampleForm) -> Source:
    source = open_dataset(item.dataset, split, subset=item.subset, revision=item.revision)
    known = source.columns
    missing = [] if known is None else [name for name in stored_columns(form.columns, known) if name not in known]
    if missing:
        raise ConfigError(
            f"{key}: {source.name} has no column {', '.join(map(repr, missing))}; its columns are "
            f"{', '.join(source.columns or [])}: correct the names in braces"
        )
    return source


def _write(form: ExampleForm, source: Source, key: str, path: Path) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in source.rows(stored_columns(form.columns, source.columns)):
            try:
                example = form.example(row.values)
            except RowError as error:
                raise ConfigError(f"{key}: {source.name}, {row.where}: {error}") from None
            file.write(json.dumps(example) + "\n")
            number += 1
    if not number:
        raise ConfigError(f"{key}: {source.name} holds no rows; give another split")
    return number
