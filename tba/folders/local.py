"""A folder on the disk as what is pushed: its files with their digests."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path

from tba.errors import ConfigError
from tba.folders.document import FolderFile
from tba.local.hub import PICKLED_FILES
from tba.local.prepared import HALF_DONE
from tba.weights.digest import sha256_of_file

RECORD = ".tba-pulled"
"""In a folder that was pulled: the manifest that it is, or is becoming, a copy of."""
LEFT_OUT_FOLDERS = (".cache", ".git")
LEFT_OUT_FILES = (RECORD, ".tmp-*", *PICKLED_FILES)
"""Pickled weights are never loaded; `tba data prepare` makes safetensors of them."""


def files_of(folder: Path) -> tuple[list[FolderFile], list[str]]:
    """(files to push with their digests, paths that are left out), both sorted.

    Raises:
        ConfigError: no such folder, it is empty, only a part of a download, or holds something that is no file.
        StoreError: a file cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder of a model in Hugging Face format")
    if (folder / HALF_DONE).exists():
        raise ConfigError(f"{folder} is only a part of a download; finish it with: tba data prepare RECIPE")
    files, left_out = [], []
    for path in sorted(_walk(folder)):
        name = path.relative_to(folder).as_posix()
        if is_left_out(name):
            left_out.append(name)
        elif not path.is_file():  # reading a pipe waits for ever
            raise ConfigError(f"{path} is no file that could be pushed (a broken link, a pipe?); remove it")
        else:
            files.append(FolderFile(path=name, size_bytes=path.stat().st_size, sha256=sha256_of_file(path)))
    if not files:
        raise ConfigError(f"{folder} holds no file that could be pushed")
    return files, left_out


def is_left_out(name: str) -> bool:
    """Whether a file, by its path inside the folder, is not pushed."""
    *folders, last = name.split("/")
    return bool(set(folders) & set(LEFT_OUT_FOLDERS)) or any(fnmatch.fnmatch(last, part) for part in LEFT_OUT_FILES)


def _walk(folder: Path) -> Iterator[Path]:
    """Files below the folder; links to files and folders are followed, as the cache of the hub has them."""
    for place, _, names in os.walk(folder, followlinks=True):
        yield from (Path(place) / name for name in names)
