"""Reads a snapshot from the store; nothing is used whose digest was not checked."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tba.api import Prompt
from tba.errors import DigestError, MalformedError, NotFoundError, ObjectNotFoundError
from tba.store import ObjectStore
from tba.threads import in_thread
from tba.wire import StoredObject
from tba.wire.snapshot import SnapshotManifest, SnapshotSource, decode_snapshot_manifest
from tba_buffer.snapshots.format import PLACE_DTYPE, decode_places

MAX_OBJECTS_HELD = 10
"""Objects in memory. A rollout that was scored again while the snapshot was written lies in an object of a later pass;
each pass wrote by position, so reading by position needs one object of every pass at a time (save.py, MAX_PASSES)."""


async def read_manifest(store: ObjectStore, source: SnapshotSource) -> tuple[SnapshotManifest, str]:
    """The manifest and its sha256.

    Raises:
        NotFoundError: there is no complete snapshot of this name.
        MalformedError: it cannot be read.
        StoreUnavailableError
    """
    try:
        data = await in_thread(lambda: store.get(source.manifest_key))
    except ObjectNotFoundError:
        raise NotFoundError(
            f"there is no snapshot {source} in {store.url} ({source.manifest_key} does not exist); `tba buffer "
            "snapshots` lists those of a run"
        ) from None
    manifest = decode_snapshot_manifest(data, key=source.manifest_key)
    if (manifest.run, manifest.name) != (source.run, source.name):
        raise MalformedError(f"{source.manifest_key} is the manifest of snapshot {manifest.run}/{manifest.name}")
    return manifest, hashlib.sha256(data).hexdigest()


class SnapshotReader:
    """The objects of one snapshot."""

    def __init__(self, store: ObjectStore, manifest: SnapshotManifest) -> None:
        self._store, self._manifest = store, manifest
        self._held: OrderedDict[int, bytes] = OrderedDict()

    async def places(self) -> NDArray[np.void]:
        """The live table (PLACE_DTYPE), by position.

        Raises:
            DigestError, MalformedError, StoreError
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
        """The rollouts at these places.

        Raises:
            DigestError, MalformedError, StoreError
        """
        found = []
        for _, number, offset, num_bytes in places.tolist():
            data = await self._object(number)
            if offset + num_bytes > len(data):
                raise MalformedError(
                    f"{self._manifest.rollouts[number].key} has {len(data)} bytes; the live table names a rollout at "
                    f"{offset} of {num_bytes} bytes"
                )
            found.append(data[offset : offset + num_bytes])
        return found

    async def prompts(self) -> AsyncIterator[list[Prompt]]:
        """The prompts in upload order, an object at a time.

        Raises:
            DigestError, MalformedError, StoreError
        """
        for stored in self._manifest.prompts:
            lines = (await self._get(stored)).splitlines()
            try:
                yield [Prompt.model_validate_json(line) for line in lines]
            except ValidationError as error:
                raise MalformedError(
                    f"{stored.key} holds something that is not a prompt: {error.errors()[0]['msg']}"
                ) from None

    async def _object(self, number: int) -> bytes:
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number]
        if number >= len(self._manifest.rollouts):
            raise MalformedError(
                f"the live table names rollouts object {number}, there are {len(self._manifest.rollouts)}"
            )
        self._held[number] = await self._get(self._manifest.rollouts[number])
        while len(self._held) > MAX_OBJECTS_HELD:
            self._held.popitem(last=False)
        return self._held[number]

    async def _get(self, stored: StoredObject) -> bytes:
        data = await in_thread(lambda: self._store.get(stored.key))
        found = hashlib.sha256(data).hexdigest()
        if len(data) != stored.size_bytes or found != stored.sha256:
            raise DigestError(
                f"object {stored.key} in {self._store.url} is damaged: {len(data)} bytes with sha256 {found}, the "
                f"manifest of the snapshot says {stored.size_bytes} bytes with {stored.sha256}"
            )
        return data
