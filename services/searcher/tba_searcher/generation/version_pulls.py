"""Weight versions on this machine: downloads them during generation, keeps needed ones, and refuses damaged ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba.concurrency import in_thread
from tba.errors import ObjectNotFoundError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tba_searcher.engines.engine import Engine
from tba_searcher.engines.weight_check import stage_weights
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.visits import Visit, WorkQueue
from tba_searcher.waits import sleep_until

SLOW_DOWNLOAD_S = 30.0
"""A download that takes longer is shown as the wait `object-store`."""
PULL_ATTEMPTS = 3
"""A version is refused after this many damaged downloads; fewer may be the fault of a transfer."""
FIRST_RETRY_S = 30.0
"""Pause before a refused version is retried; it doubles with every refusal, up to MAX_RETRY_S."""
MAX_RETRY_S = 600.0
log = get_logger("pulls")


@dataclass(frozen=True, slots=True)
class Refusal:
    """How often a version was refused, and the `time.monotonic` until which it is not retried."""

    count: int
    until_s: float


class WeightLoader:
    """Downloads versions into a local folder, and remembers which were refused.

    `download` and `download_model` block and run in a thread. The event loop's thread calls everything else.

    Args:
        counts: the searcher's counters; the loader counts refusals, downloads and downloaded bytes there.
        refusals: refusals of an earlier loader, which still hold.
    """

    def __init__(
        self,
        versions: WeightVersions,
        folder: Path,
        *,
        counts: Counter[str] | None = None,
        refusals: dict[PolicyVersion, Refusal] | None = None,
    ) -> None:
        self._versions, self._folder = versions, folder
        self._counts = Counter[str]() if counts is None else counts
        self._weights: dict[PolicyVersion, LocalVersion] = {}
        self.refusals = {} if refusals is None else refusals
        self._lock = threading.Lock()
        """Guards `_weights`, `_num_downloads` and `_unneeded`, which downloads use in another thread."""
        self._num_downloads = 0
        self._unneeded: list[LocalVersion] = []
        """Versions to delete as soon as no download runs."""

    @property
    def refused(self) -> set[PolicyVersion]:
        """Versions that failed a check and may not be retried yet."""
        # computed at each call, so that a refusal ends without a timer
        now_s = time.monotonic()
        return {version for version, refusal in self.refusals.items() if now_s < refusal.until_s}

    def refuse(self, version: PolicyVersion, reason: TbaError) -> float:
        """Refuse a version that failed a check, and delete its files. The pause before a retry doubles each time.

        Returns:
            Seconds until the version may be retried.
        """
        # a refusal may be false (memory was short, a disk flipped a bit), and must not stop all searchers for ever
        count = self.refusals[version].count + 1 if version in self.refusals else 1
        pause_s = min(FIRST_RETRY_S * 2 ** min(count - 1, 10), MAX_RETRY_S)
        self.refusals[version] = Refusal(count, time.monotonic() + pause_s)
        self._counts["refused_versions"] += 1
        log.error("version refused", version=str(version), reason=str(reason), retry_in_s=pause_s)
        self._delete(version)
        return pause_s

    def accept(self, version: PolicyVersion) -> None:
        """Forget the refusals of a version that has passed its checks."""
        self.refusals.pop(version, None)

    def download_model(self, version: PolicyVersion) -> tuple[LocalVersion, Path]:
        """Download tensors, config and tokenizer of a version; return it and the folder of its files."""
        # a folder of its own: an engine may still read the files of the version before
        folder = self._folder / f"model-{version}"
        return self._counted(lambda: self._versions.download_model(version, folder, keeps_base=True)), folder

    def download(self, version: PolicyVersion) -> LocalVersion:
        """Download the tensors of a version, as deltas to a kept version where that is cheaper.

        A refused version is not built from kept versions, because a damaged one may be the cause. Only the starting
        model is still used: each tensor built from it is verified. If one is wrong, it downloads that model again.
        """
        with self._lock:
            self._num_downloads += 1  # from here on the files of `kept` stay
            kept = tuple(self._weights.values())
        try:
            is_refused = version in self.refusals
            held = tuple(each for each in kept if each.version == START) if is_refused else kept
            folder, like = self._folder / f"tensors-{version}", next((each.manifest for each in kept), None)
            return self._counted(
                lambda: self._versions.download_tensors(version, folder, held=held, like=like, keeps_base=True)
            )
        finally:
            with self._lock:
                self._num_downloads -= 1
            self._delete_unneeded()

    def _counted(self, download: Callable[[], LocalVersion]) -> LocalVersion:
        # in the thread of a download, key by key: no other thread changes these
        try:
            weights = download()
        finally:
            for name, count in self._versions.counts.items():
                self._counts[f"weight_{name}"] = count
        self._counts[f"weight_downloads_{weights.route}"] += 1
        self._counts["weight_download_bytes"] += weights.downloaded_bytes
        return weights

    def add(self, weights: LocalVersion) -> None:
        """Keep a downloaded version, and the starting model if the version is an adapter that was merged into it."""
        with self._lock:
            self._weights[weights.version] = weights
            if (base := weights.base) is not None:
                # a second one comes where the one that is kept did not fit (damaged), or does for the first time
                old = self._weights.get(base.version)
                self._weights[base.version] = base
                if old is not None and old.paths != base.paths:
                    self._unneeded.append(old)
        self._delete_unneeded()

    def get(self, version: PolicyVersion | None) -> LocalVersion | None:
        """Return the files of a version; None if it is not on this machine or is refused."""
        return None if version is None or version in self.refused else self._weights.get(version)

    def keep_only(self, versions: Collection[PolicyVersion | None]) -> None:
        """Delete the tensors of all versions that are not in `versions`, as soon as no download runs.

        The starting model stays if a version in `versions` is an adapter: later adapters are merged into it, too.
        """
        # a version of a large model has many gigabytes, and a new one comes every few minutes
        adapters = [self._weights[version].manifest.adapter for version in self._weights if version in versions]
        bases = {PolicyVersion.parse(each.base) for each in adapters if each is not None}
        for version in set(self._weights) - set(versions) - bases:
            self._delete(version)

    def _delete(self, version: PolicyVersion) -> None:
        with self._lock:
            if (weights := self._weights.pop(version, None)) is not None:
                self._unneeded.append(weights)
        self._delete_unneeded()

    def _delete_unneeded(self) -> None:
        with self._lock:
            if self._num_downloads:
                return
            for path in (path for weights in self._unneeded for path in weights.paths):
                path.unlink(missing_ok=True)
            self._unneeded.clear()


class VersionPulls:
    """Pulls the versions that evaluations pin, then the newest one.

    Args:
        newest: returns the newest version that the buffer has named.
        return_visits: drops visits and returns their leases to the buffer.
        has_news: the caller sets it when there is a version to pull.
        has_work: set here when a version was pulled.
        tick_s: longest time between two looks for a version to pull.
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

    async def pull_forever(self) -> None:
        """Pull pinned versions first, then the newest one. Return the leases of evaluations of a refused version."""
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
                continue
            task = asyncio.ensure_future(in_thread(lambda target=target: self._loader.download(target)))
            try:
                # a transfer that makes progress is never cut off, so a slow store raises nothing
                while not (await asyncio.wait({task}, timeout=SLOW_DOWNLOAD_S))[0]:
                    self._status.waits.renew("pulling", "object-store", detail=f"version {target} is being downloaded")
                weights = await task
            except (StoreUnavailableError, ObjectNotFoundError) as error:
                # a pinned version that was deleted never comes back; the newest one is soon followed by another
                if target in pinned and isinstance(error, ObjectNotFoundError):
                    self._loader.refuse(target, error)
                else:
                    self._status.waits.renew("pulling", "object-store", detail=str(error))
                await asyncio.sleep(1.0)
            except TbaError as error:  # damaged bytes
                self._attempts[target] += 1
                log.warning(
                    "version not pulled", version=str(target), attempt=self._attempts[target], detail=str(error)
                )
                if self._attempts[target] == PULL_ATTEMPTS:
                    del self._attempts[target]
                    self._loader.refuse(target, error)
            else:
                self._status.waits.end("pulling")
                await in_thread(lambda weights=weights: stage_weights(self._engine, weights))
                self._loader.add(weights)
                self._has_work.set()
            finally:
                task.cancel()
