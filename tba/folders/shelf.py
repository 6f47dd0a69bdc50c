"""Push, pull and list folders of an object store.

A push writes files by their digest, then the manifest: killed at any point it leaves the folder of before, and the next
push goes on with what is there. A pull verifies every file, and fetches only what is not there and whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tba
from tba.errors import ConfigError, DigestError, MalformedError, ObjectExistsError, ObjectNotFoundError, StoreError
from tba.folders.document import FolderFile, FolderManifest, decode_folder_manifest, folder_digest
from tba.folders.local import RECORD, files_of
from tba.folders.needed import SHELVES, Kind
from tba.store.base import ObjectStore
from tba.store.file import new_file
from tba.weights.digest import sha256_of_file

Say = Callable[[str], None]
MANIFEST = "manifest.json"
NUM_DOWNLOAD_TRIES = 3


class Shelf:
    """The folders in one store.

    Args:
        store: where.
        say: is told what is done, a line each.
    """

    def __init__(self, store: ObjectStore, say: Say) -> None:
        self._store, self._say = store, say
        self.url = store.url

    def read(self, manifest: FolderManifest, path: str) -> bytes | None:
        """One file of a stored folder; None: it has no such file.

        Raises:
            StoreError: it cannot be read.
        """
        file = next((file for file in manifest.files if file.path == path), None)
        return None if file is None else self._store.get(_file_key(manifest.kind, manifest.name, file))

    def find(self, kind: Kind, name: str) -> FolderManifest | None:
        """What is stored under this name; None: nothing that is whole.

        Raises:
            StoreError: the store cannot be read.
            MalformedError: the manifest is damaged.
        """
        key = _manifest_key(kind, name)
        try:
            return decode_folder_manifest(self._store.get(key), where=f"{key} in {self._store.url}")
        except ObjectNotFoundError:
            return None

    def names(self) -> list[tuple[Kind, str]]:
        """Every folder that is whole."""
        found: list[tuple[Kind, str]] = []
        for kind, shelf in SHELVES.items():
            for key in self._store.list(f"{shelf}/"):
                name = key.removeprefix(f"{shelf}/").removesuffix(f"/{MANIFEST}")
                if key.endswith(f"/{MANIFEST}") and "files" not in name.split("/"):
                    found.append((kind, name))
        return found

    def push(self, kind: Kind, name: str, folder: Path, *, replace: bool = False) -> FolderManifest:
        """Store a folder; the same content again changes nothing.

        Args:
            replace: write everything again, in the place of what is stored under this name.

        Raises:
            ConfigError: the folder is none, or the store has another content under this name.
            StoreError: the store cannot be written.
        """
        files, left_out = files_of(folder)
        if left_out:
            self._say(f"{folder}: left out {', '.join(left_out[:3])}{' ...' if len(left_out) > 3 else ''}")
        digest = folder_digest(files)
        before, is_damaged = self._found(kind, name, may_be_damaged=replace)
        where = f"{SHELVES[kind]}/{name} in {self._store.url}"
        if before is not None and before.digest == digest and not replace:
            self._say(f"{where} is there already ({told(before)})")
            return before
        if before is not None and not replace:
            raise ConfigError(
                f"{where} is another folder than {folder}: {_difference(before.files, files)}; give --replace if the "
                "one here is right, or rename one of them"
            )
        manifest = FolderManifest(
            kind=kind,
            name=name,
            digest=digest,
            files=files,
            created_at_s=time.time(),
            tba_version=tba.__version__,
        )
        self._say(f"pushing {folder} to {where} ({told(manifest)})")
        for file in files:
            key = _file_key(kind, name, file)
            if replace or self._store.size_bytes(key) != file.size_bytes:
                self._store.put_file(key, folder / file.path)
        manifest = self._publish(manifest, replaces=before is not None or is_damaged)
        if before is not None or is_damaged:
            self._remove_others(manifest)
        self._say(f"{where} is pushed")
        return manifest

    def pull(self, manifest: FolderManifest, folder: Path) -> int:
        """Make `folder` the stored one; returns how many files were fetched.

        Raises:
            ConfigError: the folder holds files of something else, which was not pulled, or cannot be written.
            DigestError: what the store gives is not what was pushed.
            ObjectNotFoundError: the stored folder has just been replaced.
            StoreError: the store cannot be read.
        """
        try:
            return self._pull(manifest, folder)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise ConfigError(f"{folder} cannot be written ({error.strerror}); mount a volume there") from None

    @staticmethod
    def was_pulled(folder: Path) -> bool:
        """Whether the folder came from a store: a pull of it goes on where it stopped."""
        return (folder / RECORD).is_file()

    def _found(self, kind: Kind, name: str, *, may_be_damaged: bool) -> tuple[FolderManifest | None, bool]:
        """What is stored, and whether its manifest is damaged; only a push that replaces it may go on then."""
        try:
            return self.find(kind, name), False
        except MalformedError:
            if not may_be_damaged:
                raise
            return None, True

    def _publish(self, manifest: FolderManifest, *, replaces: bool) -> FolderManifest:
        data = manifest.model_dump_json(indent=1).encode()
        try:
            self._store.put(_manifest_key(manifest.kind, manifest.name), data, create_only=not replaces)
        except ObjectExistsError:
            other = self.find(manifest.kind, manifest.name)  # another push of the same folder was faster
            if other is None or other.digest != manifest.digest:
                raise
            return other
        return manifest

    def _remove_others(self, manifest: FolderManifest) -> None:
        """Remove files of the folder that this one took the place of."""
        wanted = {_file_key(manifest.kind, manifest.name, file) for file in manifest.files}
        for key in self._store.list(f"{SHELVES[manifest.kind]}/{manifest.name}/files/"):
            if key not in wanted:
                self._store.delete(key)

    def _pull(self, manifest: FolderManifest, folder: Path) -> int:
        record = folder / RECORD
        before = _recorded(record)
        if before is None:
            self._check_free(manifest, folder)
        missing = [file for file in manifest.files if not _is_whole(folder / file.path, file)]
        wanted = {file.path for file in manifest.files}
        extra = [] if before is None else [file for file in before.files if file.path not in wanted]
        if missing or extra:
            folder.mkdir(parents=True, exist_ok=True)
            with new_file(record) as out:
                out.write(manifest.model_dump_json().encode())
        for file in extra:
            (folder / file.path).unlink(missing_ok=True)
        for file in missing:
            self._fetch(manifest, file, folder / file.path)
        return len(missing)

    def _check_free(self, manifest: FolderManifest, folder: Path) -> None:
        """Nothing that a person put there is overwritten."""
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file, and must be a folder; remove it")
        for file in manifest.files:
            path = folder / file.path
            if path.exists() and not _is_whole(path, file):
                raise ConfigError(
                    f"{path} is not the file of {SHELVES[manifest.kind]}/{manifest.name} in {self._store.url}, and was "
                    "not pulled from there; remove that folder to pull it, or push it with --replace"
                )

    def _fetch(self, manifest: FolderManifest, file: FolderFile, path: Path) -> None:
        key = _file_key(manifest.kind, manifest.name, file)
        for _ in range(NUM_DOWNLOAD_TRIES):
            self._store.get_file(key, path)
            if _is_whole(path, file):
                return
        path.unlink(missing_ok=True)
        raise DigestError(
            f"{key} in {self._store.url} is not the {file.path} that was pushed (its sha256 differs); push the folder "
            "again with --replace"
        )


def told(manifest: FolderManifest) -> str:
    """A stored folder in a few words."""
    num = len(manifest.files)
    return f"{num} file{'s' * (num != 1)}, {manifest.size_bytes / 2**20:,.1f} MiB, digest {manifest.digest[:12]}"


def _manifest_key(kind: Kind, name: str) -> str:
    return f"{SHELVES[kind]}/{name}/{MANIFEST}"


def _file_key(kind: Kind, name: str, file: FolderFile) -> str:
    return f"{SHELVES[kind]}/{name}/files/{file.sha256}"


def _is_whole(path: Path, file: FolderFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size_bytes and sha256_of_file(path) == file.sha256


def _recorded(path: Path) -> FolderManifest | None:
    """What the folder was pulled from; None: it was not."""
    try:
        return decode_folder_manifest(path.read_bytes(), where=str(path))
    except FileNotFoundError:
        return None
    except MalformedError:
        raise ConfigError(f"{path} is damaged; remove the folder {path.parent} and pull it again") from None


def _difference(before: Sequence[FolderFile], now: Sequence[FolderFile]) -> str:
    old, new = {file.path: file.sha256 for file in before}, {file.path: file.sha256 for file in now}
    for words, paths in (
        ("differ in", [path for path in old if path in new and old[path] != new[path]]),
        ("only the stored one has", [path for path in old if path not in new]),
        ("only the one here has", [path for path in new if path not in old]),
    ):
        if paths:
            return f"{words} {', '.join(sorted(paths)[:3])}"
    return "the same files"
