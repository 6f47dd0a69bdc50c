"""Cache of weight files for the searchers of one machine: each file is downloaded and assembled once per machine.

    <folder>/<name>         a file, named by its content; read-only, because searchers have hard links to it
    <folder>/.lock-<name>   locked by the process that is making the files of a version; its death frees the lock
    <folder>/.tmp-*         a file that is being added; a process that was killed leaves it behind

The searcher that takes an entry verifies it. Beyond `max_bytes` the least recently used entries are deleted; searchers
keep the links that they have. Files with other names are never touched, so the folder may hold other things.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tba.errors import ConfigError
from tba.logs import get_logger
from tba.store.file import explain_full_disk

_ENTRY = re.compile(r"tensors-[0-9a-f]+")
_LOCK_POLL_S = 0.05
_STALE_AFTER_S = 3600.0
log = get_logger("weight-cache")


class NodeCache:
    """A bounded folder of files that are named by their content; several processes may use it at once.

    Args:
        folder: on the file system of the searchers' folders; on another one, files are copied instead of linked.
        max_bytes: limit of all entries together; a single larger file is not cached.
        wait_s: seconds to wait for another process that is making the same version, before making it here too.
        on_wait: called with `wait_s` when such a wait begins, and with None when it is over.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        wait_s: float = 600.0,
        on_wait: Callable[[float | None], object] = lambda wait_s: None,
    ) -> None:
        self._folder, self._max_bytes, self._wait_s, self._on_wait = folder, max_bytes, wait_s, on_wait
        self.num_not_cached = 0
        """Files that could not be added since this object was made: the disk is full, or the folder is gone."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in (*folder.glob(".tmp-*"), *folder.glob(".lock-*")):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - _STALE_AFTER_S:
                        path.unlink()
            # said now, and not by each version
            probe = folder / f".tmp-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"store.cache_folder {folder} cannot be used: {error.strerror}; name a folder that searchers may write"
            ) from None

    @contextmanager
    def only_one(self, name: str) -> Iterator[None]:
        """Hold the lock of `name` in the `with` block, so that one process at a time makes a version. The block runs
        without the lock if that is not free after `wait_s`, or if locking fails."""
        deadline_s = time.monotonic() + self._wait_s
        try:
            file = (self._folder / f".lock-{name}").open("w", encoding="utf-8")
        except OSError as error:  # the folder was removed, or its disk is full
            log.warning("weight_cache_not_locked", name=name, reason=str(error))
            yield
            return
        with file:
            is_waiting = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # a stopped process keeps its lock: to do its work twice is better than to wait for ever
                    if time.monotonic() > deadline_s:
                        log.warning("weight_cache_wait_over", wait="weight-cache", deadline_s=self._wait_s, name=name)
                        break
                    if not is_waiting:
                        is_waiting = True
                        self._on_wait(self._wait_s)
                    time.sleep(_LOCK_POLL_S)
                except OSError as error:  # a shared file system without locks
                    log.warning("weight_cache_not_locked", name=name, reason=str(error))
                    break
            if is_waiting:
                self._on_wait(None)
            yield

    def take(self, name: str, path: Path, *, max_bytes: int) -> bool:
        """Link or copy an entry to `path`; return False if there is none.

        The caller must verify the file, and must never write to it.

        Args:
            max_bytes: a larger entry is damaged; it is deleted from the cache, and not copied.
        """
        entry = self._folder / name
        try:
            if entry.stat().st_size > max_bytes:
                self.discard(name)
                return False
            link_or_copy(entry, path)
            _note_use(entry)
        except OSError:  # none, or evicted meanwhile
            path.unlink(missing_ok=True)
            return False
        return True

    def add(self, name: str, path: Path) -> None:
        """Add a verified file as an entry, and delete the least recently used entries beyond `max_bytes`.

        A file that cannot be added, for example to a full disk, is logged and counted; no error is raised.
        """
        size_bytes = path.stat().st_size
        if size_bytes > self._max_bytes:
            return
        temporary = self._folder / f".tmp-{uuid.uuid4().hex}"
        try:
            link_or_copy(path, temporary)
            _note_use(temporary)
            temporary.replace(self._folder / name)
            entries = []
            for each in self._folder.iterdir():
                if _ENTRY.fullmatch(each.name):
                    with suppress(FileNotFoundError):  # another process evicts as well
                        entries.append((each.stat().st_atime_ns, each.stat().st_size, each))
            total_bytes = sum(entry_bytes for _, entry_bytes, _ in entries)
            for _, entry_bytes, each in sorted(entries):
                if total_bytes <= self._max_bytes:
                    break
                each.unlink(missing_ok=True)
                (self._folder / f".lock-{each.name}").unlink(missing_ok=True)
                total_bytes -= entry_bytes
        except OSError as error:
            temporary.unlink(missing_ok=True)
            reason = explain_full_disk(error, self._folder, size_bytes=size_bytes) or str(error)
            self.num_not_cached += 1
            log.warning("weight_not_cached", name=name, reason=reason)

    def discard(self, name: str) -> None:
        """Delete a damaged entry."""
        log.warning("weight_cache_damaged", name=name)
        (self._folder / name).unlink(missing_ok=True)


def _note_use(path: Path) -> None:
    """Set the access time to now. The modification time stays: searchers use it to tell whether their file changed."""
    with suppress(PermissionError):  # an entry of another user
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `target` to `source`; copy the file where linking fails, for example to another file system."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
