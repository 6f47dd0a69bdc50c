"""The contract of an object store; both implementations pass tests/contract/test_store_contract.py."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Protocol

from tba.errors import StoreError

MAX_KEY_CHARS = 900
"""S3 allows 1,024 bytes; the rest is for the prefix of the store."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]*")


class ObjectStore(Protocol):
    """Whole objects under keys like `runs/demo/weights/1-40/manifest.json`.

    A write is durable when the call returns, and atomic: readers see the whole object or none. A write that was
    retried after a broken answer succeeds if the object it finds has the content to be written. All methods may be
    called from several threads, and raise StoreUnavailableError with one sentence that says what to do.
    """

    url: str
    """Where the objects are, for messages."""

    def check(self, *, write: bool = False) -> None:
        """Check at start-up that the store can be used.

        Args:
            write: also check that objects can be written and that create-only writes are honoured.

        Raises:
            StoreUnavailableError: unreachable, bucket missing, access denied, or create-only writes not honoured.
        """
        ...

    def create_bucket(self) -> None:
        """Make the bucket or folder of the objects if there is none.

        Raises:
            StoreUnavailableError: that is not allowed.
        """
        ...

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write an object.

        Raises:
            ObjectExistsError: `create_only`, and the key is taken.
        """
        ...

    def put_file(self, key: str, path: Path, *, create_only: bool = False) -> None:
        """Write an object from a file, streamed.

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

    def get_file(self, key: str, path: Path) -> None:
        """Read an object into a file, streamed; the file appears under its name when it is complete.

        Raises:
            ObjectNotFoundError: no object has this key.
        """
        ...

    def size_bytes(self, key: str) -> int | None:
        """Return the size of an object; None if there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""
        ...

    def list(self, prefix: str) -> builtins.list[str]:
        """Return all keys that start with `prefix`, sorted. The prefix is plain text: `a/b` also finds `a/bc`."""
        ...


def check_key(key: str) -> str:
    """Return the key if every store can hold it.

    Raises:
        StoreError: empty, too long, absolute, an empty part, or a part that is not a plain file name.
    """
    if not key or len(key) > MAX_KEY_CHARS or not all(_PART.fullmatch(part) for part in key.split("/")):
        raise StoreError(
            f"object key {key!r} is not allowed: use 1 to {MAX_KEY_CHARS} characters, parts joined by single slashes, "
            "each a letter or digit followed by letters, digits and . _ = + @ -"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if keys can start with it; empty is allowed.

    Raises:
        StoreError: see `check_key`.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix
