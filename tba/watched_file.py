"""Keep a value that is loaded from files up to date without a restart, when the files change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tba.errors import ConfigError
from tba.logs import get_logger

RECHECK_S = 1.0
"""Seconds between two checks for a change."""
T = TypeVar("T")
Stamp = tuple[tuple[int, ...] | None, ...]
log = get_logger("files")


class WatchedFile(Generic[T]):
    """Load a value at once, and again when one of its files has changed; safe to share between threads.

    If a later `load` fails, that is logged, and the old value stays.

    Raises:
        ConfigError: raised by the first `load`.
    """

    def __init__(self, paths: Sequence[str | Path], load: Callable[[], T], *, what: str) -> None:
        self._paths, self._load, self._what = [Path(path) for path in paths], load, what
        self._lock = threading.Lock()
        self._refused: Stamp | None = None
        self._stamp = self._stat()  # before reading: what changes meanwhile is seen next time
        self._value = load()
        self._next_check_s = time.monotonic() + RECHECK_S

    @property
    def value(self) -> T:
        """The last value that could be loaded; this checks the files for a change, at most once in RECHECK_S."""
        # another thread is looking already: nobody waits for it, the old value is good for a moment
        if time.monotonic() >= self._next_check_s and self._lock.acquire(blocking=False):
            try:
                self._next_check_s = time.monotonic() + RECHECK_S
                if (stamp := self._stat()) != self._stamp:
                    self._read_again(stamp)
            finally:
                self._lock.release()
        return self._value

    def _read_again(self, stamp: Stamp) -> None:
        try:
            self._value = self._load()
        except (ConfigError, OSError, ValueError) as error:
            # Somebody may be half-way through writing the file, or this process has too many files open: keep the old
            # value, try again at the next check, and log each state of the file once.
            if stamp != self._refused:
                log.error("changed_file_not_used", what=self._what, problem=str(error), still="what was read before")
            self._refused = stamp
        else:
            self._stamp, self._refused = stamp, None
            log.info("changed_file_used", what=self._what)

    def _stat(self) -> Stamp:
        stamps: list[tuple[int, ...] | None] = []
        for path in self._paths:
            try:
                found = os.stat(path)  # follows symbolic links: Kubernetes updates a mounted Secret by switching one
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        return tuple(stamps)
