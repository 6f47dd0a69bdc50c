"""Writes rollouts into objects, and remembers where each lies."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tba.store import ObjectStore
from tba.threads import in_thread
from tba.wire import StoredObject
from tba_buffer.snapshots.format import OBJECT_BYTES, PLACE_DTYPE


class SnapshotWriter:
    """The objects of one attempt to save a snapshot.

    The names of the objects carry the attempt: what an attempt that was cut off still writes can never be an object of
    another one.

    Args:
        prefix: what the keys begin with.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._attempt = secrets.token_hex(4)
        self._parts: list[bytes] = []
        self._num_part_bytes = 0
        self._rows: list[tuple[int, int, int, int]] = []
        self._places: list[NDArray[np.void]] = []
        self.objects: list[StoredObject] = []
        self.num_written = 0
        self.num_bytes = 0

    async def add(self, position: int, payload: bytes) -> None:
        """Write one rollout; the same position again replaces it.

        Raises:
            StoreError
        """
        if self._parts and self._num_part_bytes + len(payload) > OBJECT_BYTES:
            await self.flush()
        self._rows.append((position, len(self.objects), self._num_part_bytes, len(payload)))
        self._parts.append(payload)
        self._num_part_bytes += len(payload)
        self.num_written += 1
        self.num_bytes += len(payload)

    async def flush(self) -> None:
        """Store what is not stored yet.

        Raises:
            StoreError
        """
        if not self._parts:
            return
        self.objects.append(await self.put("rollouts", len(self.objects), "msgpack", self._parts))
        self._places.append(np.array(self._rows, dtype=PLACE_DTYPE))
        self._parts, self._rows, self._num_part_bytes = [], [], 0

    def places(self) -> NDArray[np.void]:
        """Where the newest copy of every rollout written so far lies, by position; what is not flushed is left out."""
        every = np.concatenate(self._places) if self._places else np.zeros(0, dtype=PLACE_DTYPE)
        _, first = np.unique(every["position"][::-1], return_index=True)
        return every[::-1][first]

    async def put(self, kind: str, number: int, suffix: str, parts: Sequence[bytes]) -> StoredObject:
        """Store one object.

        Raises:
            StoreError
        """
        data = b"".join(parts)
        name = f"{kind}-{self._attempt}-{number:05}.{suffix}"
        key = self._prefix + name
        await in_thread(lambda: self._store.put(key, data))
        return StoredObject(name=name, key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
