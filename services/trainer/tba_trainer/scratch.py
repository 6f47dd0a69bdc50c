"""A folder for large files of this process, deleted when it ends; also what killed processes have left is deleted.

A killed process cannot clean up, and a snapshot is as large as the model. Every folder holds a lock file that its
process keeps locked, and the kernel unlocks it when the process is gone, whatever ended it.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tba.starting import deleted_on_quit

PREFIX = "tba-trainer-"
_LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder under the system's folder for temporary files (TMPDIR)."""
    _delete_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with deleted_on_quit(folder):
                yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, not ours, or not locked yet
            continue
