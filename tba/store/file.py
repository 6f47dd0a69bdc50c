"""The contract of object stores, and the embedded store: a local folder, or a shared one that supports hard links.

Every implementation passes tests/contract/test_store_contract.py.

The embedded store writes a temporary file in the same folder, then fsync, rename, fsync of the folder. A create-only
write uses a hard link in place of the rename, because a link fails if the key is taken. A process that is killed leaves
the old object or the new one, and perhaps a temporary file, whose name is not a valid key.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from tba.errors import DigestError, ObjectExistsError, ObjectNotFoundError, StoreError, StoreUnavailableError, TbaError

MAX_KEY_CHARS = 900
"""S3 allows 1,024 bytes; the remaining ones are for the prefix of the store."""

PART = r"[A-Za-z0-9][A-Za-z0-9._=+@-]*"


class ObjectStore(Protocol):
    """A store of whole objects under keys such as `runs/demo/weights/1-40/manifest.json`.

    A write is durable when the call returns, and atomic: readers see the whole object or none. A create-only write may
    be retried after a lost answer; it succeeds if the existing object has the content to be written. All methods may be
    called from several threads, and raise StoreUnavailableError, whose message says what to do.
    """

    url: str
    """URL of the store, for messages."""

    def check(self, *, write: bool = False) -> None:
        """Check at start-up that the store can be used.

        Args:
            write: also write and delete a test object, to check that create-only writes are honoured.

        Raises:
            StoreUnavailableError: unreachable, bucket missing, access denied, or create-only writes not honoured.
        """
        ...

    def create_bucket(self) -> None:
        """Create the bucket or folder of the store if it does not exist.

        Raises:
            StoreUnavailableError: this user may not create it.
        """
        ...

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write an object.

        Raises:
            ObjectExistsError: `create_only`, and the key is taken.
        """
        ...

    def put_file(self, key: str, path: Path, *, create_only: bool = False) -> None:
        """Write an object from a file, without reading the whole file into memory.

        Raises:
            ObjectExistsError: `create_only`, and the key is taken.
        """
        ...

    def get(self, key: str) -> bytes:
        """Read an object.

        Raises:
            ObjectNotFoundError: no object has this key.
        """
        ...

    def get_file(self, key: str, path: Path, *, max_bytes: int | None = None) -> None:
        """Download an object to the file `path`, which appears only when it is complete.

        Args:
            max_bytes: size limit; a larger object is not downloaded.

        Raises:
            ObjectNotFoundError: no object has this key.
            DigestError: the object has more than `max_bytes`.
        """
        ...

    def size_bytes(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if no object has this key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; do nothing if no object has this key."""
        ...

    def list(self, prefix: str) -> builtins.list[str]:
        """Return all keys that start with the text `prefix`, sorted; `a/b` also finds `a/bc`."""
        ...


def check_key(key: str) -> str:
    """Return the key unchanged if every store can hold it.

    Raises:
        StoreError: the key is empty, too long or absolute, or one of its parts is not a plain file name.
    """
    if not key or len(key) > MAX_KEY_CHARS or not all(re.fullmatch(PART, part) for part in key.split("/")):
        raise StoreError(
            f"object key {key!r} is not allowed: use 1 to {MAX_KEY_CHARS} characters, parts joined by single slashes, "
            "each a letter or digit followed by letters, digits and . _ = + @ -"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix unchanged if keys can start with it; it may be empty.

    Raises:
        StoreError: see `check_key`.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


_TEMPORARY = ".tmp-"
_STALE_AFTER_S = 24 * 3600.0
_CHUNK_BYTES = 1 << 20
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_HARDLY_FREE_BYTES = 1 << 20


def explain_full_disk(error: OSError, *places: str | Path, size_bytes: int | None = None) -> str | None:
    """Return a sentence about a full disk or an exhausted quota; None for any other error.

    Args:
        places: paths that the process may have written to. If the error names no file, the fullest disk is taken.
        size_bytes: number of bytes that were to be written, if known.
    """
    # EDQUOT: the disk has room, and the quota of this user has none
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    named = [error.filename2 or error.filename] if isinstance(error.filename, str) else list(places)
    absolute = [Path(os.path.abspath(place)) for place in named]
    folders = [next(path for path in (place, *place.parents) if path.is_dir()) for place in absolute]
    # the error does not always name the file: then the fullest disk is the likeliest one
    folder = min(folders, key=lambda path: shutil.disk_usage(path).free)
    usage = shutil.disk_usage(folder)
    wanted = "" if size_bytes is None else f", and {size_bytes:,} bytes were to be written"
    what = "is full" if error.errno == errno.ENOSPC else f"accepts no more data from user {os.getuid()} (quota)"
    return f"the disk of {folder} {what}: {usage.free:,} of {usage.total:,} bytes are free{wanted}; free some space"


def explain_no_space(folder: Path) -> str | None:
    """Return a sentence about the full disk of `folder`, after a writer failed there; None if it has free space."""
    if shutil.disk_usage(folder).free > _HARDLY_FREE_BYTES:
        return None
    return explain_full_disk(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)


class FileStore:
    """Store each object as a file below one folder; see `ObjectStore` for the contract."""

    def __init__(self, folder: Path) -> None:
        self._root = Path(os.path.abspath(folder))
        self.url = f"file://{self._root}"

    def check(self, *, write: bool = False) -> None:
        """Create the folder if needed, and delete temporary files older than a day; with `write`, test a write."""
        # a folder need not exist before its first use, but one that cannot be made is a wrong store.url
        with self._errors("use the folder", ""):
            self._make_folder(self._root)
            for path in self._root.rglob(_TEMPORARY + "*"):  # left long ago by a writer that was killed
                with suppress(FileNotFoundError):  # its writer was alive, or another process removed it first
                    if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                        path.unlink()
        if write:
            key = f"check/{secrets.token_hex(8)}"
            self.put(key, b"tba", create_only=True)
            self.delete(key)

    def create_bucket(self) -> None:
        """Create the folder."""
        with self._errors("make the folder of", ""):
            self._make_folder(self._root)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write an object."""
        self._write(key, lambda out: out.write(data), create_only=create_only, size_bytes=len(data))

    def put_file(self, key: str, path: Path, *, create_only: bool = False) -> None:
        """Write an object from a file."""
        with open_source(path) as source:
            size_bytes = os.fstat(source.fileno()).st_size
            self._write(
                key,
                lambda out: shutil.copyfileobj(source, out, _CHUNK_BYTES),
                create_only=create_only,
                size_bytes=size_bytes,
            )

    def get(self, key: str) -> bytes:
        """Read an object."""
        with self._errors("read", key):
            return self._path(key).read_bytes()

    def get_file(self, key: str, path: Path, *, max_bytes: int | None = None) -> None:
        """Read an object into a file."""
        with self._errors("read", key, place=path), self._path(key).open("rb") as source:
            check_size(key, os.fstat(source.fileno()).st_size, max_bytes, url=self.url)
            with new_file(path) as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)

    def size_bytes(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if no object has this key."""
        with self._errors("look up", key):
            path = self._path(key)
            return path.stat().st_size if path.is_file() else None

    def delete(self, key: str) -> None:
        """Delete an object; do nothing if no object has this key."""
        with self._errors("delete", key):
            path = self._path(key)
            if path.is_file():
                path.unlink(missing_ok=True)  # another process may have deleted it first
                _fsync_folder(path.parent)

    def list(self, prefix: str) -> builtins.list[str]:
        """Return all keys that start with `prefix`, sorted."""
        top = self._root / check_prefix(prefix).rpartition("/")[0]
        keys = []
        with self._errors("list", prefix):
            for folder, _, names in os.walk(top):
                for name in names:
                    key = (Path(folder) / name).relative_to(self._root).as_posix()
                    # another process may be writing one at this moment
                    if not name.startswith(_TEMPORARY) and key.startswith(prefix):
                        keys.append(key)
        return sorted(keys)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _write(self, key: str, fill: Callable[[BinaryIO], object], *, create_only: bool, size_bytes: int) -> None:
        with self._errors("write", key, size_bytes):
            path = self._path(key)
            if create_only and path.exists():  # cheap early answer; the link below decides
                raise FileExistsError
            self._make_folder(path.parent)
            temporary = path.with_name(_TEMPORARY + secrets.token_hex(8))
            try:
                with temporary.open("xb") as out:
                    fill(out)
                    out.flush()
                    # without it a power cut may leave the new name with no content behind it
                    os.fsync(out.fileno())
                if create_only:
                    _create(temporary, path)
                else:
                    os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _fsync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and its parents, with fsync, so that they survive a power failure."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError:
                # mkdir says "exists" also where a plain file has the name
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
            _fsync_folder(folder.parent)

    @contextmanager
    def _errors(
        self, verb: str, key: str, size_bytes: int | None = None, *, place: Path | None = None
    ) -> Iterator[None]:
        where = f"{key or 'store'} in {self.url}"
        try:
            yield
        except TbaError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            # a missing file is the normal answer to a read; anywhere else the root itself is gone
            if verb != "read":
                raise StoreUnavailableError(f"cannot {verb} {where}: {error}; correct store.url") from error
            raise ObjectNotFoundError(f"object {where} does not exist") from error
        except FileExistsError as error:
            raise ObjectExistsError(f"object {where} exists already, and this write may only create") from error
        except PermissionError as error:
            raise StoreUnavailableError(
                f"cannot {verb} {where}: permission denied; give this user read and write access to the folder"
            ) from error
        except OSError as error:
            what = explain_full_disk(error, place or self._root, size_bytes=size_bytes)
            what = what or f"{error.strerror or error}; correct store.url"
            raise StoreUnavailableError(f"cannot {verb} {where}: {what}") from error


def _create(temporary: Path, path: Path) -> None:
    """Hard-link a complete file to its final name, which fails if the name is taken; a rename would overwrite."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StoreUnavailableError(
            f"the file system of {path.parent} has no hard links, which a store needs; use another folder, or S3"
        ) from error


def explain_no_locks(folder: Path, error: OSError) -> str:
    """Return a sentence about a file system that does not lock files, as Lustre and NFS may not."""
    return (
        f"the file system of {folder} does not lock files ({error.strerror}), so two processes could write there at "
        "once; use a folder on a disk of this machine, or mount that one with locks (Lustre: -o flock)"
    )


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file to write. If the `with` block raises no error, the file then replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_TEMPORARY + secrets.token_hex(8))
    try:
        with temporary.open("xb") as out:
            yield out
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_size(key: str, size_bytes: int, max_bytes: int | None, *, url: str) -> None:
    """Raise DigestError if an object has more than `max_bytes`, so that it is not downloaded and fills no disk."""
    if max_bytes is not None and size_bytes > max_bytes:
        raise DigestError(f"object {key} in {url} is damaged: {size_bytes} bytes, and no more than {max_bytes} are due")


def open_source(path: Path) -> BinaryIO:
    """Open a local file that is to be stored.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise StoreError(f"file {path} cannot be stored: {error.strerror}") from error


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
