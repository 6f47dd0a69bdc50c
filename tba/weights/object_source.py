"""The files of weight versions: out of a read-through cache where there is one and it works, else out of the store.

What a cache gives is verified like everything else; what does not fit is read again from the store.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, StoreError
from tba.logs import get_logger
from tba.store import ObjectStore

REST_S = 60.0
"""A cache that failed is not asked again for so long: a version has many files, and each would wait for it."""
Reason = Literal["missing", "unavailable", "damaged"]
Result = TypeVar("Result")
log = get_logger("weights")


class ObjectSource:
    """Reads files of one store.

    Args:
        read_through: a cache of the store; None: there is none.
    """

    def __init__(self, store: ObjectStore, read_through: ObjectStore | None) -> None:
        self._store, self._cache = store, read_through
        self._rests_until_s = 0.0
        self._num_files = 0
        """That came from the cache, empty ones too."""
        self.counts: Counter[str] = Counter()
        """Since the start: `read_through_bytes` that the cache gave, and how often it failed, by reason:
        `read_through_missing`, `read_through_unavailable`, `read_through_damaged`."""

    def get_file(self, key: str, path: Path, *, max_bytes: int) -> None:
        """Read an object into a file, as `ObjectStore.get_file`.

        Raises:
            StoreError: of the store itself; an error of the cache is logged and counted.
        """
        if self._cache is not None and time.monotonic() >= self._rests_until_s:
            try:
                self._cache.get_file(key, path, max_bytes=max_bytes)
                self._num_files += 1
                self.counts["read_through_bytes"] += path.stat().st_size
                return
            except (StoreError, ValueError) as error:  # ValueError: a header that boto3 cannot read
                reason: Reason = "missing" if isinstance(error, ObjectNotFoundError) else "unavailable"
                if isinstance(error, DigestError):  # larger than the manifest says
                    reason = "damaged"
                # the error itself speaks of the store's settings
                self._note_failure(reason, f"{key}: {error.__cause__ or error}")
        self._store.get_file(key, path, max_bytes=max_bytes)

    def verified(self, download: Callable[[], Result]) -> Result:
        """Return what a download that verifies its bytes returns; when those of the cache do not fit, it is made again.

        Args:
            download: reads by `get_file`; the second time from the store alone.

        Raises:
            DigestError, MalformedError: the store's own bytes do not fit, or none came from the cache.
        """
        before = self._num_files
        try:
            return download()
        except (DigestError, MalformedError) as error:
            if self._num_files == before:
                raise
            self._note_failure("damaged", str(error))
        self._rests_until_s = math.inf  # a large version takes longer than REST_S
        try:
            return download()
        finally:
            self._rests_until_s = time.monotonic() + REST_S

    def _note_failure(self, reason: Reason, detail: str) -> None:
        """Count a failure of the cache, and leave it alone for a while unless it only lacks an object."""
        self.counts[f"read_through_{reason}"] += 1
        log.warning("weights_read_through_failed", reason=reason, detail=detail)
        if reason != "missing":
            self._rests_until_s = time.monotonic() + REST_S
