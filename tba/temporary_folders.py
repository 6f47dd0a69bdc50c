"""Temporary folders for large files; folders left by killed processes are deleted when the next one is created."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"


@contextmanager
def temporary_folder(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder, and delete it at the end of the `with` block.

    First delete folders with the same prefix that killed processes have left, which nobody locks any more.
    """
    parent = parent or Path(tempfile.gettempdir())
    # a lock and not a process id: ids are used again, and in containers that share TMPDIR all may be number 1
    for abandoned in parent.glob(f"{prefix}*"):
        with (
            suppress(OSError),  # in use, not ours, or not locked yet
            (abandoned / _LOCK).open("r+", encoding="utf-8") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(abandoned, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        new = folder / f".{_LOCK}"
        # the kernel releases this lock when the process is gone, whatever ended it
        with new.open("w", encoding="utf-8") as lock:
            with suppress(OSError):  # a file system without locks: then nobody may think the folder abandoned
                fcntl.flock(lock, fcntl.LOCK_EX)
                # only now: with a lock that nobody holds the folder would look so
                new.rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
