"""The weight versions that the object store has, for people; the way of the weights never passes through here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tba.api.versions import WeightVersionInfo, WeightVersionList
from tba.concurrency import in_thread
from tba.errors import ObjectNotFoundError, StoreUnavailableError, UnavailableError
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions

MAX_SHOWN = 50


class WeightVersionReader:
    """Lists versions, and keeps what it has read of them: a manifest never changes.

    Args:
        open_store: opens the object store of the run; called at the first request.
        run: the run's name.
    """

    def __init__(self, open_store: Callable[[], ObjectStore], run: str) -> None:
        self._open_store = open_store
        self._run = run
        self._known: dict[PolicyVersion, WeightVersionInfo] = {}
        self._reading = asyncio.Lock()

    async def newest(self) -> WeightVersionList:
        """Return the newest MAX_SHOWN versions.

        Raises:
            UnavailableError: the store did not answer.
        """
        # one reading for all who ask at once: a list of a bucket costs a request
        async with self._reading:
            try:
                return await in_thread(self._read)
            except StoreUnavailableError as error:
                raise UnavailableError(f"the object store did not list the weight versions: {error}") from None

    def _read(self) -> WeightVersionList:
        versions = WeightVersions(self._open_store(), self._run)
        found = sorted(versions.versions(), reverse=True)
        shown, known = found[:MAX_SHOWN], dict[PolicyVersion, WeightVersionInfo]()
        for version in shown:
            try:
                known[version] = self._known.get(version) or _info(versions, version)
            except ObjectNotFoundError:
                continue  # deleted by the trainer since it was listed
        self._known = known
        return WeightVersionList(versions=list(known.values()), num_older=len(found) - len(shown))


def _info(versions: WeightVersions, version: PolicyVersion) -> WeightVersionInfo:
    manifest = versions.manifest(version)
    return WeightVersionInfo(
        version=manifest.version,
        parent=manifest.parent,
        published_at_s=manifest.created_at_s,
        num_bytes=sum(stored.size_bytes for stored in manifest.tensors),
        dtype=manifest.dtype,
    )
