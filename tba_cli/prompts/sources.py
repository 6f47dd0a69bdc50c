"""Rows of a JSONL file or of a data set of the Hugging Face library, one after another.

JSONL is not read by `datasets.load_dataset("json", streaming=True)`. Its errors name no line, and its import takes
seconds. It also gives all rows one schema, so that an absent key becomes null.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tba.errors import ConfigError, not_installed

UTF8_MARK = b"\xef\xbb\xbf"
FOLDER_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place ("file FILE, line 3" or "data set NAME, row 3", from 1) and its values by column name."""

    where: str
    values: Mapping[str, Any]


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yield one row per line, which is a JSON object; empty lines are skipped."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"file {path} has the suffix {path.suffix!r}; give a .jsonl file")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # some editors put a byte order mark before the first line
                content = line.removeprefix(UTF8_MARK) if number == 1 else line
                if content.strip():
                    where = f"file {path}, line {number}"
                    yield Row(where, _object(where, content))
    except OSError as error:
        raise ConfigError(f"file {path} cannot be read: {error.strerror or error}") from None


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = from_json(line.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: it is not UTF-8 text") from None
    except ValueError as error:
        raise ConfigError(f"{where}: it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {value!r:.60} is not a JSON object")
    return value


def dataset_rows(
    name: str, split: str, *, subset: str | None, columns: Collection[str], optional: Collection[str]
) -> Iterator[Row]:
    """Yield the rows of a data set that `datasets.load_dataset` finds: on the hub, in its cache, or in a folder.

    Args:
        name: name on the hub, or a folder with data files.
        split: the split to read, for example train or train[:1000].
        subset: the configuration to read, if there are several; for example main of openai/gsm8k.
        columns: the columns to read, or paths into nested columns; if one is missing, all columns are read.
        optional: more columns to read where the data set has them.
    """
    where = f"data set {name if subset is None else f'{name}:{subset}'} (split {split})"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise not_installed("reading a data set", "datasets") from None
    datasets.disable_progress_bars()
    if Path(name).is_file():
        raise ConfigError(f"{where} is a file; name the folder that it lies in")
    if (Path(name) / "state.json").is_file():
        raise ConfigError(f"{where} was written by save_to_disk; name a folder with Parquet files (to_parquet)")
    # the library's cache goes by the name of a folder: without the digest it would return old content
    folder, cache = Path(name), None
    if folder.is_dir():
        found = [(path.relative_to(folder).as_posix(), path.stat()) for path in folder.rglob("*") if path.is_file()]
        content = [str(folder.resolve()), sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:FOLDER_DIGITS]
        cache = str(Path(datasets.config.HF_DATASETS_CACHE) / "tba-folders" / digest)
    try:
        dataset = datasets.load_dataset(name, subset, split=split, cache_dir=cache)
    except Exception as error:  # data set, hub and network raise anything, and the library has no base class
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {reason}") from None
    known = dataset.column_names
    wanted = {column if column in known else column.partition(".")[0] for column in columns}
    if wanted <= set(known):
        # other columns are not decoded: they may be images
        dataset = dataset.select_columns(sorted(wanted | {*optional}.intersection(known)))
    for number, values in enumerate(dataset, start=1):
        yield Row(f"{where}, row {number}", values)
