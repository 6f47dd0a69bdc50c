"""`tba model pull`: wait until the folders that a service needs are whole in the store, and fetch them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tba.errors import ObjectNotFoundError, StoreUnavailableError, WaitTimeoutError
from tba.folders.document import FolderManifest
from tba.folders.needed import SHELVES, NeededFolder
from tba.folders.shelf import Shelf, told
from tba.store.waiting import lacks_bucket, passes_by_itself

POLL_S = 2.0
SAY_EVERY_S = 30.0


def pull_folders(shelf: Shelf, folders: Sequence[NeededFolder], *, wait_s: float, say: Callable[[str], None]) -> None:
    """Fetch every folder to its path; what is there and whole is only checked.

    Args:
        wait_s: deadline of the wait (wait `model-push`) for the folders to be in the store, all together; a download
            that has begun is not cut off.

    Raises:
        ConfigError: something else lies at a path, or it cannot be written.
        WaitTimeoutError: a folder was not in the store in time.
        StoreError: the store refuses, or gives damaged files.
    """
    deadline_s = time.monotonic() + wait_s
    for folder in folders:
        manifest, num_fetched = _pull(shelf, folder, deadline_s=deadline_s, wait_s=wait_s, say=say)
        what = "fetched" if num_fetched else "is there and whole"
        say(f"{folder.path}: {folder.kind} {folder.name}, {told(manifest)}, {what}")


def _pull(
    shelf: Shelf, folder: NeededFolder, *, deadline_s: float, wait_s: float, say: Callable[[str], None]
) -> tuple[FolderManifest, int]:
    while True:
        manifest = _wait_for(shelf, folder, deadline_s=deadline_s, wait_s=wait_s, say=say)
        try:
            return manifest, shelf.pull(manifest, Path(folder.path).expanduser())
        except ObjectNotFoundError:  # replaced between manifest and files
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def _wait_for(
    shelf: Shelf, folder: NeededFolder, *, deadline_s: float, wait_s: float, say: Callable[[str], None]
) -> FolderManifest:
    said_s = -SAY_EVERY_S
    while True:
        reason = f"{SHELVES[folder.kind]}/{folder.name} is not whole in {shelf.url} yet"
        try:
            manifest = shelf.find(folder.kind, folder.name)
            if manifest is not None:
                return manifest
        except StoreUnavailableError as error:
            if not (passes_by_itself(error) or lacks_bucket(error)):
                raise
            reason = str(error)
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise WaitTimeoutError(
                f"wait 'model-push': {folder.path} ({folder.key}) was not in the store within {wait_s:.0f} s: {reason}"
                "; `tba setup` or `tba model push` puts it there"
            )
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            say(f"wait 'model-push' ({deadline_s - now_s:.0f} s left): {reason}")
        time.sleep(min(POLL_S, max(deadline_s - now_s, 0.01)))
