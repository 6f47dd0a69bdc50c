"""The manifest of a stored folder: which files it has, by path and digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from tba.config.base import StrictModel
from tba.errors import MalformedError
from tba.wire.manifest import Sha256

MAX_FILES = 100_000


class FolderFile(StrictModel):
    """One file of a stored folder."""

    path: str = Field(min_length=1, max_length=1024)
    """Relative to the folder, with slashes."""
    size_bytes: int = Field(ge=0)
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        parts = path.split("/")
        if PurePosixPath(path).is_absolute() or "\\" in path or "\0" in path or {"", ".", ".."} & set(parts):
            raise ValueError(f"{path!r} is no path inside a folder")
        return path


class FolderManifest(StrictModel):
    """A folder in the store; it exists once its manifest does."""

    schema_version: Literal[1] = 1
    kind: Literal["model", "dataset"]
    name: str
    digest: Sha256
    """Over paths and contents of all files: the same digest is the same folder."""
    files: list[FolderFile] = Field(min_length=1, max_length=MAX_FILES)
    created_at_s: float
    """When it was pushed, as Unix time in seconds."""
    tba_version: str

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)


def folder_digest(files: Sequence[FolderFile]) -> str:
    """The digest of a folder with these files, in whatever order they come."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        digest.update(f"{file.sha256} {file.size_bytes} {file.path}\n".encode())
    return digest.hexdigest()


def decode_folder_manifest(data: bytes, *, where: str) -> FolderManifest:
    """Parse a manifest.

    Args:
        where: the key, for the message.

    Raises:
        MalformedError: it is not one, or its digest is not that of its files.
    """
    try:
        manifest = FolderManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise MalformedError(
            f"{where} is no manifest of a folder: {place}: {first['msg']}; push it again with --replace"
        ) from None
    if manifest.digest != folder_digest(manifest.files):
        raise MalformedError(f"{where}: the digest is not that of its files; push the folder again with --replace")
    return manifest
