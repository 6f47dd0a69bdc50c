"""List the weight versions in the object store, for people. The weights themselves never pass through the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tba.api import WeightVersionInfo, WeightVersionList
from tba.concurrency import SingleFlight, in_thread
from tba.errors import ObjectNotFoundError, StoreError, UnavailableError, WireError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions

MAX_SHOWN = 50
log = get_logger("weight_versions")


class WeightVersionReader:
    """Lists weight versions, and caches the content of their manifests, which never change.

    Args:
        open_store: returns the object store of the run; the first call opens it.
        run: the run's name.
    """

    def __init__(self, open_store: Callable[[], ObjectStore], run: str) -> None:
        self._open_store = open_store
        self._run = run
        self._known: dict[PolicyVersion, WeightVersionInfo | None] = {}
        """The cached content of each manifest; None: that manifest cannot be read."""
        self._newest = WeightVersionList(versions=[], num_older=0)
        # one reading for all who ask at once: a list of a bucket costs a request
        self._reading = SingleFlight(self._read, asyncio.Lock())

    async def newest(self) -> WeightVersionList:
        """List the object store; return the newest MAX_SHOWN versions, and the number of older ones.

        Raises:
            UnavailableError: the store did not answer.
        """
        await self._reading.run()
        return self._newest

    async def _read(self) -> None:
        try:
            self._newest = await in_thread(self._list)
        except StoreError as error:
            raise UnavailableError(f"the object store did not list the weight versions: {error}") from None

    def _list(self) -> WeightVersionList:
        versions = WeightVersions(self._open_store(), self._run)
        found = sorted(versions.versions(), reverse=True)
        shown, known = found[:MAX_SHOWN], dict[PolicyVersion, WeightVersionInfo | None]()
        for version in shown:
            if version in self._known:
                known[version] = self._known[version]
                continue
            try:
                manifest = versions.manifest(version)
            except ObjectNotFoundError:
                continue  # deleted by the trainer since it was listed
            except WireError as error:
                log.warning("unreadable_manifest", version=str(version), problem=str(error))
                known[version] = None
                continue
            known[version] = WeightVersionInfo(
                version=manifest.version,
                parent=manifest.parent,
                published_at_s=manifest.created_at_s,
                num_bytes=manifest.full_bytes,
                dtype=manifest.dtype,
            )
        self._known = known
        readable = [info for info in known.values() if info is not None]
        return WeightVersionList(versions=readable, num_older=len(found) - len(shown))
