"""The manifest of a stored folder: its files by path and digest, parsed from JSON or read from a folder on disk."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from tba.errors import ConfigError, MalformedError
from tba.fields import StrictModel
from tba.weights import sha256_of_file
from tba.wire.weight_manifest import Sha256
from tba_cli.artifacts.huggingface import PICKLED_FILES

MAX_FILES = 100_000
LEFT_OUT_FOLDERS = frozenset({".cache", ".git"})
LEFT_OUT_FILES = (".tmp-*", *PICKLED_FILES)
"""Files that are not pushed. Pickled weights are never loaded; `tba data prepare` converts them to safetensors."""


class FolderFile(StrictModel):
    """One file of a stored folder."""

    path: str = Field(min_length=1, max_length=1024)
    """Relative to the folder, with slashes."""
    size_bytes: int = Field(ge=0)
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        # the store may be written by others, and a pull must not write outside of its folder
        parts = path.split("/")
        if PurePosixPath(path).is_absolute() or "\\" in path or "\0" in path or {"", ".", ".."} & set(parts):
            raise ValueError(f"{path!r} is not a path inside a folder")
        return path


class FolderManifest(StrictModel):
    """A folder in the store; it exists as soon as its manifest does."""

    schema_version: Literal[1] = 1
    kind: Literal["model", "dataset"]
    name: str
    digest: Sha256
    """Digest of the paths and contents of all files: folders with the same digest are equal."""
    files: list[FolderFile] = Field(min_length=1, max_length=MAX_FILES)
    created_at_s: float
    """Unix time of the push."""
    tba_version: str

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)


def folder_digest(files: Sequence[FolderFile]) -> str:
    """Return the digest of a folder with these files; their order does not matter."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        # with the path: a file that was renamed makes another folder
        digest.update(f"{file.sha256} {file.size_bytes} {file.path}\n".encode())
    return digest.hexdigest()


def decode_folder_manifest(data: bytes, *, where: str) -> FolderManifest:
    """Parse a manifest.

    Args:
        where: the manifest's key and store, for the message.

    Raises:
        MalformedError: the data is not a manifest, or its digest is not the digest of its files.
    """
    try:
        manifest = FolderManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise MalformedError(
            f"{where} is not the manifest of a folder: {place}: {first['msg']}; remove it, and push it again"
        ) from None
    if manifest.digest != folder_digest(manifest.files):
        raise MalformedError(f"{where}: its digest does not match its files; remove it, and push it again")
    return manifest


def files_of(folder: Path) -> tuple[list[FolderFile], list[str]]:
    """Return the files of a folder to push, with their digests, and the paths that are left out; both are sorted."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of a model in Hugging Face format")
    files, left_out = [], []
    # the cache of the hub keeps its files behind links
    found = (Path(place) / name for place, _, names in os.walk(folder, followlinks=True) for name in names)
    for path in sorted(found):
        name = path.relative_to(folder).as_posix()
        is_ours = LEFT_OUT_FOLDERS.isdisjoint(name.split("/")[:-1])
        if not is_ours or any(fnmatch.fnmatch(path.name, pattern) for pattern in LEFT_OUT_FILES):
            left_out.append(name)
        elif not path.is_file():  # to read a pipe would wait for ever
            raise ConfigError(f"{path} is not a file that can be pushed (a broken link, a pipe?); remove it")
        else:
            files.append(FolderFile(path=name, size_bytes=path.stat().st_size, sha256=sha256_of_file(path)))
    if not files:
        raise ConfigError(f"{folder} holds no file that can be pushed")
    return files, left_out
