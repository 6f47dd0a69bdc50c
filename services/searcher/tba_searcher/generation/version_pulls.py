"""Weight versions on their way to this machine: pulled beside generation, prepared for the engine, or refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from tba.concurrency import in_thread
from tba.errors import ObjectNotFoundError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.weights import LocalVersion
from tba_searcher.engines.engine import Engine
from tba_searcher.engines.weight_loader import WeightLoader, stage_weights
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.visits import Visit, WorkQueue
from tba_searcher.waits import RETRY_S, sleep_until

SLOW_DOWNLOAD_S = 30.0
"""A download that takes longer is shown as the wait `object-store`."""
PULL_ATTEMPTS = 3
"""Damaged bytes may come from a damaged transfer; after this many attempts the version is refused."""
log = get_logger("pulls")


class VersionPulls:
    """Pulls the versions that evaluations pin, then the newest one.

    Args:
        newest: returns the newest version by the word of the buffer.
        return_visits: drops visits, and returns their leases.
        has_news: set when there is a version to pull.
        has_work: set when a version was pulled.
        tick_s: how often the task polls for versions.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        loader: WeightLoader,
        queue: WorkQueue,
        newest: Callable[[], PolicyVersion],
        status: SearcherStatus,
        return_visits: Callable[[Sequence[Visit]], Awaitable[object]],
        has_news: asyncio.Event,
        has_work: asyncio.Event,
        tick_s: float,
    ) -> None:
        self._engine, self._loader, self._queue, self._newest = engine, loader, queue, newest
        self._status, self._return_visits = status, return_visits
        self._has_news, self._has_work, self._tick_s = has_news, has_work, tick_s
        self._attempts: Counter[PolicyVersion] = Counter()

    def refuse(self, version: PolicyVersion, reason: TbaError) -> None:
        """Refuse a version that failed a check, count it, and say why."""
        retry_in_s = self._loader.refuse(version)
        self._status.counts["refused_versions"] += 1
        log.error("version refused", version=str(version), reason=str(reason), retry_in_s=retry_in_s)

    async def pull_forever(self) -> None:
        """Pull pinned versions first, then the newest; return the leases of evaluations whose version is refused."""
        while True:
            refused = self._loader.refused
            pinned = [v for v in self._queue.pinned_versions() if self._loader.get(v) is None]
            impossible = [v for v in self._queue.open_visits() if v.pinned in refused]
            if impossible:
                await self._return_visits(impossible)
            # an evaluation holds up training while its version is not here
            target = next((v for v in (*pinned, self._newest()) if v not in refused), None)
            if target is None or self._loader.get(target) is not None:
                self._status.waits.end("pulling")
                await sleep_until(self._has_news, self._tick_s)
            else:
                await self._pull(target, is_pinned=target in pinned)

    async def _pull(self, target: PolicyVersion, *, is_pinned: bool) -> None:
        try:
            weights = await self._download(target)
        except (StoreUnavailableError, ObjectNotFoundError) as error:
            # a pinned version that was deleted never comes back; the newest one is soon followed by another
            if is_pinned and isinstance(error, ObjectNotFoundError):
                self.refuse(target, error)
            else:
                self._wait_for_store(str(error))
            await asyncio.sleep(1.0)
        except TbaError as error:  # damaged bytes
            self._attempts[target] += 1
            log.warning("version not pulled", version=str(target), attempt=self._attempts[target], detail=str(error))
            if self._attempts[target] == PULL_ATTEMPTS:
                del self._attempts[target]
                self.refuse(target, error)
        else:
            self._status.waits.end("pulling")
            self._status.count_download(weights)
            await in_thread(lambda: stage_weights(self._engine, weights))
            self._loader.add(weights)
            self._has_work.set()

    async def _download(self, version: PolicyVersion) -> LocalVersion:
        """Download a version; one that takes longer than SLOW_DOWNLOAD_S is shown as a wait, until it has come."""
        task = asyncio.ensure_future(in_thread(lambda: self._loader.download(version)))
        try:
            # a transfer that makes progress is never cut off, so a slow store raises nothing
            while not (await asyncio.wait({task}, timeout=SLOW_DOWNLOAD_S))[0]:
                self._wait_for_store(f"version {version} is being downloaded")
            return await task
        finally:
            task.cancel()
            self._status.note_weight_counts(self._loader.counts)

    def _wait_for_store(self, detail: str) -> None:
        """Begin or continue the wait for the store; the version before is used meanwhile."""
        if self._status.waits.begin("pulling", "object-store", RETRY_S) <= 0:
            log.warning("wait renewed", wait="object-store", detail=detail)
            self._status.waits.end("pulling")
            self._status.waits.begin("pulling", "object-store", RETRY_S)
