"""The objects of a snapshot: their writer, which remembers the place of each rollout, and their reader.

A rollouts object is rollout documents one after the other. The live table names the documents that count. It has no row
for a rollout that was evicted during the save, and names the newest copy of a rollout that was scored again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tba.api import Prompt
from tba.concurrency import in_thread
from tba.errors import DigestError, MalformedError, NotFoundError, ObjectNotFoundError
from tba.fields import first_problem
from tba.store import ObjectStore
from tba.wire import StoredObject
from tba.wire.codec import Document, pack, unpack
from tba.wire.snapshot_manifest import SnapshotManifest, SnapshotSource, decode_snapshot_manifest, snapshot_names

SCHEMA = 1
OBJECT_BYTES = 8 << 20
"""A rollouts or prompts object is closed once it is this large."""
ROWS_PER_TABLE = 1_000_000
PLACE_DTYPE = np.dtype([("position", "<u8"), ("object", "<u4"), ("offset", "<u4"), ("num_bytes", "<u4")])
"""The place of a rollout: its position in the log, the number of its object, offset and size in it. 20 bytes."""


class _LiveDocument(Document, frozen=True):
    schema: Literal[1]
    rows: bytes


_DECODER = msgspec.msgpack.Decoder(_LiveDocument)


def encode_places(places: NDArray[np.void]) -> bytes:
    """Encode a piece of the live table."""
    return pack({"schema": SCHEMA, "rows": places.tobytes()})


def decode_places(data: bytes) -> NDArray[np.void]:
    """Decode a piece of the live table. [n] of PLACE_DTYPE

    Raises:
        MalformedError, SchemaVersionError, LimitError: `data` is no such piece.
    """
    rows = unpack(data, _DECODER, what="live table", schema=SCHEMA).rows
    # a table that was cut would lose rollouts without a word
    if len(rows) % PLACE_DTYPE.itemsize:
        raise MalformedError(f"live table: {len(rows)} bytes are not rows of {PLACE_DTYPE.itemsize}")
    return np.frombuffer(rows, dtype=PLACE_DTYPE)


class SnapshotWriter:
    """Writes the objects of one attempt to save a snapshot."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        # in the name of each object: what an interrupted attempt still writes can never be an object of another one
        self._attempt = secrets.token_hex(4)
        self._parts: list[bytes] = []
        self._num_part_bytes = 0
        self._rows: list[tuple[int, int, int, int]] = []
        self._places: list[NDArray[np.void]] = []
        self.objects: list[StoredObject] = []
        self.num_written = 0
        self.num_bytes = 0

    async def add(self, position: int, payload: bytes) -> None:
        """Add one rollout; if it does not fit, store the object first. A later payload of `position` replaces it."""
        # a payload is never split: one that is larger than an object has an object of its own
        if self._parts and self._num_part_bytes + len(payload) > OBJECT_BYTES:
            await self.flush()
        self._rows.append((position, len(self.objects), self._num_part_bytes, len(payload)))
        self._parts.append(payload)
        self._num_part_bytes += len(payload)
        self.num_written += 1
        self.num_bytes += len(payload)

    async def flush(self) -> None:
        """Store the rollouts that were added and not stored yet, as one object."""
        if not self._parts:
            return
        self.objects.append(await self.put("rollouts", len(self.objects), "msgpack", self._parts))
        self._places.append(np.array(self._rows, dtype=PLACE_DTYPE))
        self._parts, self._rows, self._num_part_bytes = [], [], 0

    def places(self) -> NDArray[np.void]:
        """Return the places (PLACE_DTYPE) of the newest copies of all flushed rollouts, by ascending log position."""
        every = np.concatenate(self._places) if self._places else np.zeros(0, dtype=PLACE_DTYPE)
        # reversed, so that the first of equal positions is the newest copy
        _, first = np.unique(every["position"][::-1], return_index=True)
        return every[::-1][first]

    async def put(self, kind: str, number: int, suffix: str, parts: Sequence[bytes]) -> StoredObject:
        """Store one object made of `parts`; return its name, key, size and sha256."""
        data = b"".join(parts)
        name = f"{kind}-{self._attempt}-{number:05}.{suffix}"
        key = self._prefix + name
        await in_thread(lambda: self._store.put(key, data))
        return StoredObject(name=name, key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


MAX_OBJECTS_HELD = 10
"""Most objects in memory. Each pass of a save (at most MAX_PASSES, save.py) wrote its rollouts by position, so reading
by position needs one object of every pass at a time."""


async def read_manifest(store: ObjectStore, source: SnapshotSource) -> tuple[SnapshotManifest, str]:
    """Read the manifest of a snapshot; return it and its sha256 (hex).

    Raises:
        NotFoundError: there is no complete snapshot of this name.
        MalformedError: the manifest cannot be read.
        StoreUnavailableError: the object store did not answer.
    """
    try:
        data = await in_thread(lambda: store.get(source.manifest_key))
    except ObjectNotFoundError:
        known = ", ".join(await in_thread(lambda: snapshot_names(store, source.run))) or "none"
        raise NotFoundError(
            f"there is no snapshot {source} in {store.url} ({source.manifest_key} does not exist); those of run "
            f"{source.run} are: {known}"
        ) from None
    manifest = decode_snapshot_manifest(data, key=source.manifest_key)
    # a copied folder: its manifest names the objects of the snapshot that it was copied from
    if (manifest.run, manifest.name) != (source.run, source.name):
        raise MalformedError(f"{source.manifest_key} is the manifest of snapshot {manifest.run}/{manifest.name}")
    return manifest, hashlib.sha256(data).hexdigest()


class SnapshotReader:
    """Reads the objects of one snapshot, and checks the digest of each before its use."""

    def __init__(self, store: ObjectStore, manifest: SnapshotManifest) -> None:
        self._store, self._manifest = store, manifest
        self._held: OrderedDict[int, bytes] = OrderedDict()

    async def places(self) -> NDArray[np.void]:
        """Read the live table (PLACE_DTYPE), by ascending log position.

        Raises:
            DigestError, MalformedError, StoreError: an object is damaged, or the store failed.
        """
        pieces = [decode_places(await self._get(stored)) for stored in self._manifest.live]
        places = np.concatenate(pieces) if pieces else np.zeros(0, dtype=PLACE_DTYPE)
        if len(places) != self._manifest.num_rollouts or (np.diff(places["position"].astype(np.int64)) <= 0).any():
            raise MalformedError(
                f"snapshot {self._manifest.run}/{self._manifest.name}: the live table has {len(places)} rows, not "
                f"{self._manifest.num_rollouts} in the order of their positions"
            )
        return places

    async def payloads(self, places: NDArray[np.void]) -> list[bytes]:
        """Read the payloads of the rollouts at these places [n]. [n]

        Raises:
            DigestError, MalformedError, StoreError: an object is damaged, or the store failed.
        """
        found = []
        for _, number, offset, num_bytes in places.tolist():
            if number not in self._held:
                if number >= len(self._manifest.rollouts):
                    raise MalformedError(
                        f"the live table names rollouts object {number}, there are {len(self._manifest.rollouts)}"
                    )
                self._held[number] = await self._get(self._manifest.rollouts[number])
                if len(self._held) > MAX_OBJECTS_HELD:
                    self._held.popitem(last=False)
            self._held.move_to_end(number)
            data = self._held[number]
            if offset + num_bytes > len(data):
                raise MalformedError(
                    f"{self._manifest.rollouts[number].key} has {len(data)} bytes; the live table names a rollout at "
                    f"{offset} of {num_bytes} bytes"
                )
            found.append(data[offset : offset + num_bytes])
        return found

    async def prompts(self) -> AsyncIterator[list[Prompt]]:
        """Yield the prompts in upload order, one object at a time.

        Raises:
            DigestError, MalformedError, StoreError: an object is damaged, or the store failed.
        """
        for stored in self._manifest.prompts:
            lines = (await self._get(stored)).splitlines()
            try:
                yield [Prompt.model_validate_json(line) for line in lines]
            except ValidationError as error:
                raise MalformedError(
                    f"{stored.key} holds something that is not a prompt: {first_problem(error)}"
                ) from None

    async def _get(self, stored: StoredObject) -> bytes:
        data = await in_thread(lambda: self._store.get(stored.key))
        found = hashlib.sha256(data).hexdigest()
        # always: a snapshot may be copied between stores, by tools that check nothing
        if len(data) != stored.size_bytes or found != stored.sha256:
            raise DigestError(
                f"object {stored.key} in {self._store.url} is damaged: {len(data)} bytes with sha256 {found}, the "
                f"manifest of the snapshot says {stored.size_bytes} bytes with {stored.sha256}"
            )
        return data
