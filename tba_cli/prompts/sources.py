"""Rows of a data set, one after another: a JSONL file, a Parquet file, or a data set of the Hugging Face library.

Sources stream: they hold a few thousand rows in memory, however large the file is, and can be read again.

Files are not read by `datasets.load_dataset("json" or "parquet", streaming=True)`: its errors name no line, it refuses
Parquet columns of maps ("no datasets dtype equivalent"), it gives all rows one schema, so that an absent key becomes
null, and its import takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import from_json

from tba.errors import ConfigError
from tba_cli.prompts.columns import RowError, column, is_chat, messages

ROWS_PER_READ = 64
"""One value may stand for many rows of a file, so that a few kilobytes unpack to gigabytes."""
MAX_UNPACKED_CHARS, MAX_UNPACKED_RATIO = 2**29, 1000
"""A Parquet file is refused beyond both: so many characters, and so many for each byte of its size."""
HF_PREFIX = "hf:"
UTF8_MARK = b"\xef\xbb\xbf"
FOLDER_DIGITS = 20
SAVED_FOLDER_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files that `datasets.save_to_disk` writes into a folder."""


Render = Callable[[list[Any], Mapping[str, Any]], Sequence["str | RowError"]]
"""Makes the text of each conversation with arguments of the chat template, or says why there is none."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place ("line 3" or "row 3", from 1) and its values by column name."""

    where: str
    values: Mapping[str, Any]


class Source(Protocol):
    """Rows that can be read again and again."""

    @property
    def name(self) -> str:
        """Its name in errors."""
        ...

    @property
    def columns(self) -> Sequence[str] | None:
        """Its columns; None where every row has its own (JSONL)."""
        ...

    @property
    def is_table(self) -> bool:
        """Whether every row has every column, with null where there is no value."""
        ...

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield all rows in order; columns other than these need not be read. Raises ConfigError."""
        ...


def open_source(text: str, *, hf_split: str) -> Source:
    """Open the source that a user names: FILE.jsonl, FILE.parquet, a folder of `save_to_disk`, or hf:NAME[:CONFIG].

    Raises:
        ConfigError: it is none of these, cannot be read, or needs a library that is not installed.
    """
    if text.startswith(HF_PREFIX):
        name, _, subset = text.removeprefix(HF_PREFIX).partition(":")
        return HubSource(name, hf_split, subset=subset or None)
    path = Path(text)
    return SavedSource(path, hf_split) if path.is_dir() else open_file(path)


def open_file(path: Path) -> Source:
    """Open a JSONL or Parquet file, by its suffix.

    Raises:
        ConfigError: the file has another suffix, or cannot be read.
    """
    kinds = {".jsonl": JsonlSource, ".parquet": ParquetSource}
    if path.suffix not in kinds:
        raise ConfigError(f"file {path} has the suffix {path.suffix!r}; give a .jsonl or a .parquet file")
    return kinds[path.suffix](path)


class JsonlSource:
    """One JSON object per line; empty lines are skipped.

    Args:
        path: the file, UTF-8 text.
    """

    columns = None
    is_table = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = f"file {path}"

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield all rows, with all their keys.

        Raises:
            ConfigError: the file cannot be read, or a line is not a JSON object.
        """
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    # some editors put a byte order mark before the first line
                    content = line.removeprefix(UTF8_MARK) if number == 1 else line
                    if content.strip():
                        yield Row(f"line {number}", self._object(number, content))
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be read: {error.strerror or error}") from None

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = from_json(line.decode())
        except UnicodeDecodeError:
            raise ConfigError(f"{self.name}, line {number}: it is not UTF-8 text") from None
        except ValueError as error:
            raise ConfigError(f"{self.name}, line {number}: it is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.name}, line {number}: {value!r:.60} is not a JSON object")
        return value


class TextsSource:
    """Texts that are written out, each a row with the column `text`."""

    columns = ("text",)
    is_table = True

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        self.name, self._texts = name, texts

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield all rows."""
        for number, text in enumerate(self._texts, start=1):
            yield Row(f"item {number}", {"text": text})


class ParquetSource:
    """A Parquet file, read in pieces.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be read, or pyarrow is not installed.
    """

    is_table = True

    def __init__(self, path: Path) -> None:
        self._parquet = _library("pyarrow.parquet", "a Parquet file")
        self._arrow_error = _library("pyarrow", "a Parquet file").ArrowException
        self._path = path
        self.name = f"file {path}"
        with self._opened() as file:
            self.columns = list(file.schema_arrow.names)

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield all rows.

        Raises:
            ConfigError: the file cannot be read, or has several columns of one name.
        """
        twice = [name for name in columns or self.columns if self.columns.count(name) > 1]
        if twice:  # a row could hold one of them only
            raise ConfigError(f"{self.name} has several columns {twice[0]!r}; rename them")
        number = num_chars = 0
        most_chars = max(MAX_UNPACKED_CHARS, MAX_UNPACKED_RATIO * self._path.stat().st_size)
        with self._opened() as file:
            batches = file.iter_batches(batch_size=ROWS_PER_READ, columns=columns)
            while (batch := self._next(batches)) is not None:
                found = batch.to_pylist(maps_as_pydicts="strict")
                num_chars += _size(found)  # that of the batch counts a value once that many rows have
                if num_chars > most_chars:
                    raise ConfigError(
                        f"{self.name} unpacks to more than {most_chars:,} characters, read up to row "
                        f"{number + len(found)}; shorten the texts that its rows repeat"
                    )
                for values in found:
                    number += 1
                    yield Row(f"row {number}", values)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, None)
        except (OSError, self._arrow_error) as error:
            raise ConfigError(f"{self.name} cannot be read: {_first_line(error)}") from None

    def _opened(self) -> Any:
        try:
            with self._path.open("rb"):  # errors of the system say more than those of pyarrow
                return self._parquet.ParquetFile(self._path)
        except (OSError, self._arrow_error) as error:
            reason = getattr(error, "strerror", None) or _first_line(error)
            raise ConfigError(f"{self.name} cannot be read: {reason}") from None


def _size(value: Any) -> int:
    """Return the characters of all texts of a value, and 1 for everything else."""
    if isinstance(value, str | bytes):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value
    return sum(map(_size, inner)) if isinstance(value, dict | list) else 1


class _DatasetSource:
    """A `datasets.Dataset`; to load it may download it."""

    name: str
    is_table = True
    _dataset: Any

    @property
    def columns(self) -> list[str]:
        """Its columns."""
        return list(self._dataset.column_names)

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield all rows."""
        # other columns are not decoded: they may be images
        dataset = self._dataset if columns is None else self._dataset.select_columns(list(columns))
        for number, values in enumerate(dataset, start=1):
            yield Row(f"row {number}", values)


class HubSource(_DatasetSource):
    """A data set that `datasets.load_dataset` finds: on the hub, in its cache, or in a folder of data files.

    Args:
        name: on the hub, or a folder.
        split: which split of it, for example train or train[:1000].
        subset: which configuration, where it has several; for example main of openai/gsm8k.

    Raises:
        ConfigError: the library is not installed, or cannot load it.
    """

    def __init__(self, name: str, split: str, *, subset: str | None = None) -> None:
        self.name = f"data set {name if subset is None else f'{name}:{subset}'} (split {split})"
        datasets = _library("datasets", "a Hugging Face data set")
        datasets.disable_progress_bars()
        # the library's cache goes by the name of a folder: without the digest it would return old content
        root = Path(datasets.config.HF_DATASETS_CACHE)
        cache = root / "tba-folders" / _folder_digest(Path(name)) if Path(name).is_dir() else None
        self._dataset = _loaded(
            self.name,
            lambda: datasets.load_dataset(name, subset, split=split, cache_dir=cache and str(cache)),
        )


class SavedSource(_DatasetSource):
    """A folder that `datasets.save_to_disk` made: one data set, or several by split.

    Args:
        path: the folder.
        split: which split, where the folder has several.

    Raises:
        ConfigError: the library is not installed, or the folder was not made by it.
    """

    def __init__(self, path: Path, split: str) -> None:
        self.name = f"data set folder {path}"
        if not any((path / file).is_file() for file in SAVED_FOLDER_FILES):
            raise ConfigError(
                f"{self.name} was not made by datasets.save_to_disk; give a .jsonl or .parquet file, "
                f"or hf:{path} for a folder of data files"
            )
        datasets = _library("datasets", "a saved Hugging Face data set")
        found = _loaded(self.name, lambda: datasets.load_from_disk(str(path)))
        if isinstance(found, dict):
            if split not in found:
                raise ConfigError(f"{self.name} has no split {split!r}, but {', '.join(found)}; choose by --hf-split")
            found, self.name = found[split], f"{self.name} (split {split})"
        self._dataset = found


class ChatSource:
    """A source whose messages are rendered as texts.

    Args:
        source: its rows are all read at once, with the columns of the first call.
        column: the column with a text or messages.
        render: makes texts of many conversations; called only if there is one.
        template_kwargs: arguments of the chat template.
    """

    def __init__(
        self,
        source: Source,
        column: str,
        render: Render,
        *,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._source, self._column, self._render = source, column, render
        self._template_kwargs = template_kwargs
        self._rows: list[Row] | None = None
        self.name, self.columns, self.is_table = source.name, source.columns, source.is_table

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Yield all rows.

        Raises:
            ConfigError: as the source raises it, or the messages of a row cannot be rendered.
        """
        if self._rows is None:
            self._rows = self._rendered(list(self._source.rows(columns)))
        yield from self._rows

    def _rendered(self, rows: list[Row]) -> list[Row]:
        chats = {number: chat for number, row in enumerate(rows) if (chat := self._chat(row)) is not None}
        if self._template_kwargs and not chats:
            raise ConfigError(
                f"{self.name}: column {self._column!r} holds no messages that chat_template_kwargs are for; remove them"
            )
        texts = self._render(list(chats.values()), self._template_kwargs) if chats else []
        for number, text in zip(chats, texts, strict=True):
            row = rows[number]
            if isinstance(text, RowError):
                raise ConfigError(f"{self.name}, {row.where}: column {self._column!r}: {text}")
            rows[number] = Row(row.where, {**row.values, self._column: text})
        return rows

    def _chat(self, row: Row) -> list[Any] | None:
        try:
            value = column(row.values, self._column)
            return messages(f"column {self._column!r}", value) if is_chat(value) else None
        except RowError as error:
            raise ConfigError(f"{self.name}, {row.where}: {error}") from None


def _folder_digest(folder: Path) -> str:
    """Return a digest of the path of a folder and of the names, sizes and times of its files."""
    files = [(path.relative_to(folder).as_posix(), path.stat()) for path in folder.rglob("*") if path.is_file()]
    content = [str(folder.resolve()), sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:FOLDER_DIGITS]


def _loaded(name: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # data set, hub and network raise anything, and the library has no base class
        raise ConfigError(f"{name} cannot be loaded: {type(error).__name__}: {_first_line(error)}") from None


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ConfigError(
            f"reading {what} needs {package}, which is not installed; install the extra `data`: pip install 'tba[data]'"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
