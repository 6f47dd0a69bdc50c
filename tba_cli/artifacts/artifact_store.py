"""Push folders of models and data sets to an object store, and pull them.

A push writes the files by their digest, then the manifest. If it is killed, the next push skips the files that are
stored already. A pull verifies the files on disk, and downloads the missing ones. Neither replaces anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tba
from tba.errors import (
    ConfigError,
    DigestError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
    WaitTimeoutError,
)
from tba.store import ObjectStore
from tba.store.open import is_bucket_missing, is_retryable
from tba.weights import sha256_of_file
from tba_cli.artifacts.manifest import FolderFile, FolderManifest, decode_folder_manifest, files_of, folder_digest
from tba_cli.artifacts.required import KIND_PREFIXES, Kind, RequiredFolder

OnProgress = Callable[[str], None]
MANIFEST = "manifest.json"
NUM_DOWNLOAD_TRIES = 3
POLL_S = 2.0
PROGRESS_INTERVAL_S = 30.0


class ArtifactStore:
    """The folders of models and data sets in one object store.

    Args:
        store: the object store.
        on_progress: called with a line of text about each thing that is done.
    """

    def __init__(self, store: ObjectStore, on_progress: OnProgress) -> None:
        self._store, self.on_progress = store, on_progress
        self.url = store.url

    def find(self, kind: Kind, name: str) -> FolderManifest | None:
        """Return the manifest stored under this name, or None if no complete folder is stored.

        Raises:
            StoreError: the store cannot be read.
            MalformedError: the manifest is damaged.
        """
        key = _manifest_key(kind, name)
        try:
            return decode_folder_manifest(self._store.get(key), where=f"{key} in {self._store.url}")
        except ObjectNotFoundError:
            return None

    def read(self, manifest: FolderManifest, path: str) -> bytes | None:
        """Download one file of a stored folder and return its content, or None if there is no such file."""
        file = next((file for file in manifest.files if file.path == path), None)
        return None if file is None else self._store.get(_file_key(manifest.kind, manifest.name, file))

    def push(self, kind: Kind, name: str, folder: Path) -> FolderManifest:
        """Upload a folder, and return its manifest; do nothing if the same content is stored already."""
        files, left_out = files_of(folder)
        if left_out:
            self.on_progress(f"{folder}: left out {', '.join(left_out[:3])}{' ...' if len(left_out) > 3 else ''}")
        manifest = FolderManifest(
            kind=kind,
            name=name,
            digest=folder_digest(files),
            files=files,
            created_at_s=time.time(),
            tba_version=tba.__version__,
        )
        where = f"{KIND_PREFIXES[kind]}/{name} in {self._store.url}"
        if (before := self.find(kind, name)) is not None:
            self._check_same(before, manifest, f"{where} has other content than {folder}")
            self.on_progress(f"{where} is there already ({describe(before)})")
            return before
        self.on_progress(f"pushing {folder} to {where} ({describe(manifest)})")
        for file in files:
            key = _file_key(kind, name, file)
            # keys are digests: an object of this size is this file, from a push that was killed
            if self._store.size_bytes(key) != file.size_bytes:
                self._store.put_file(key, folder / file.path)
        # last, because a folder is whole as soon as its manifest is there
        data = manifest.model_dump_json(indent=1).encode()
        try:
            self._store.put(_manifest_key(kind, name), data, create_only=True)
        except ObjectExistsError:
            # another push was faster; with the same content that is no conflict
            if (other := self.find(kind, name)) is None:
                raise
            self._check_same(other, manifest, f"{where} was pushed with other content meanwhile")
        self.on_progress(f"{where} is pushed")
        return manifest

    def pull(self, manifest: FolderManifest, folder: Path) -> int:
        """Download the files of the stored folder that are missing in `folder`; return how many were missing.

        Raises:
            ConfigError: `folder` is a file, has another file of the same name, or cannot be written.
            DigestError: a stored file differs from the one that was pushed.
            StoreError: the store cannot be read.
        """
        try:
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder} is a file, and must be a folder; remove it")
            for file in manifest.files:
                if (folder / file.path).exists() and not _is_whole(folder / file.path, file):
                    raise ConfigError(
                        f"{folder / file.path} is not the file of {KIND_PREFIXES[manifest.kind]}/{manifest.name} in "
                        f"{self._store.url}; remove that folder to pull it"
                    )
            missing = [file for file in manifest.files if not (folder / file.path).exists()]
            for file in missing:
                self._fetch(manifest, file, folder / file.path)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise ConfigError(f"{folder} cannot be written ({error.strerror}); mount a volume there") from None
        return len(missing)

    @staticmethod
    def _check_same(stored: FolderManifest, manifest: FolderManifest, what: str) -> None:
        if stored.digest != manifest.digest:
            raise ConfigError(f"{what}; rename one of them, or remove the stored one from the bucket")

    def _fetch(self, manifest: FolderManifest, file: FolderFile, path: Path) -> None:
        key = _file_key(manifest.kind, manifest.name, file)
        # a download may be damaged on its way
        for _ in range(NUM_DOWNLOAD_TRIES):
            self._store.get_file(key, path)
            if _is_whole(path, file):
                return
        path.unlink(missing_ok=True)
        raise DigestError(
            f"{key} in {self._store.url} is not the {file.path} that was pushed (its sha256 differs); remove the "
            "folder from the bucket, and push it again"
        )


def describe(manifest: FolderManifest) -> str:
    """Return the file count, size and digest of a stored folder as text."""
    num = len(manifest.files)
    return f"{num} file{'s' * (num != 1)}, {manifest.size_bytes / 2**20:,.1f} MiB, digest {manifest.digest[:12]}"


def _manifest_key(kind: Kind, name: str) -> str:
    return f"{KIND_PREFIXES[kind]}/{name}/{MANIFEST}"


def _file_key(kind: Kind, name: str, file: FolderFile) -> str:
    return f"{KIND_PREFIXES[kind]}/{name}/files/{file.sha256}"


def _is_whole(path: Path, file: FolderFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size_bytes and sha256_of_file(path) == file.sha256


def pull_folders(artifacts: ArtifactStore, folders: Sequence[RequiredFolder], *, wait_s: float) -> None:
    """Wait until every folder is complete in the store, and download it to its path; only check what is there already.

    Args:
        wait_s: longest wait for all folders together (wait `model-push`); a running download is not interrupted.

    Raises:
        WaitTimeoutError: a folder was not in the store in time.
        StoreError: the store refuses, or gives damaged files.
    """
    deadline_s = time.monotonic() + wait_s
    for folder in folders:
        shown_s = -PROGRESS_INTERVAL_S
        while True:
            reason = f"{KIND_PREFIXES[folder.kind]}/{folder.name} is not complete in {artifacts.url} yet"
            try:
                manifest = artifacts.find(folder.kind, folder.name)
                if manifest is not None:
                    num_fetched = artifacts.pull(manifest, Path(folder.path).expanduser())
                    state = "fetched" if num_fetched else "is there and complete"
                    artifacts.on_progress(f"{folder.path}: {folder.kind} {folder.name}, {describe(manifest)}, {state}")
                    break
            except StoreUnavailableError as error:
                if not (is_retryable(error) or is_bucket_missing(error)):
                    raise
                reason = str(error)
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise WaitTimeoutError(
                    f"wait 'model-push': {folder.path} ({folder.key}) was not in the store within {wait_s:.0f} s: "
                    f"{reason}; `tba setup` puts it there"
                )
            if now_s - shown_s > PROGRESS_INTERVAL_S:
                shown_s = now_s
                artifacts.on_progress(f"wait 'model-push' ({deadline_s - now_s:.0f} s left): {reason}")
            time.sleep(min(POLL_S, max(deadline_s - now_s, 0.01)))
