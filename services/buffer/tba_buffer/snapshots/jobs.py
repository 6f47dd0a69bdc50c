"""Saving and loading as jobs of the buffer service: one at a time, shown in GET /v1/run while they run.

A run that is to begin with a snapshot (`run.snapshot`, or POST /v1/snapshots/load) takes no trainer before everything
is loaded. The next start of the service continues a load that was interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from tba.api import LoadRequest, OriginInfo, SnapshotInfo
from tba.concurrency import in_thread
from tba.errors import ConflictError, StoreUnavailableError, SupersededError, TbaError, UnavailableError
from tba.logs import get_logger
from tba.store import ObjectStore, open_store
from tba.wire.snapshot_manifest import SnapshotSource
from tba_buffer.eviction.evictor import Evictor
from tba_buffer.index.log_follower import IndexView
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.run.components import Components
from tba_buffer.run.lineage import Lineages
from tba_buffer.snapshots.load import OriginDocument, SnapshotLoad
from tba_buffer.snapshots.save import SnapshotSave
from tba_buffer.snapshots.snapshot_format import read_manifest
from tba_buffer.storage.context import Context, RunHash, needed

OWNER = "buffer"
SAVE, LOAD = "snapshot-save", "snapshot-load"
DEADLINE_S = 3600.0
STOP_TIMEOUT_S = 5.0
RETRY_S = 2.0
log = get_logger("snapshots")


class SnapshotJobs:
    """Saves snapshots of this run, and loads the one it begins with.

    Args:
        context: Redis and settings.
        view: the index.
        catalog: the prompts.
        lineages: the lineage table.
        evictor: evicts what a load brings too much.
        components: shows the waits.
    """

    def __init__(
        self,
        context: Context,
        *,
        view: IndexView,
        catalog: Catalog,
        lineages: Lineages,
        evictor: Evictor,
        components: Components,
    ) -> None:
        self._context, self._view, self._catalog, self._lineages = context, view, catalog, lineages
        self._evictor, self._components = evictor, components
        self._opened: ObjectStore | None = None
        self._task: asyncio.Task[None] | None = None
        self._save: tuple[SnapshotSource, SnapshotSave] | None = None
        self._load: tuple[LoadRequest, SnapshotLoad] | None = None
        self._failed: dict[str, str] = {}
        """Name of a wait -> why its last job failed, until the next job of its kind begins."""
        self._load_problem: str | None = None
        """Why the load last had to wait."""

    @property
    def is_saving(self) -> bool:
        """Whether a snapshot is being written: the log must not be cut."""
        return self._is_busy and self._save is not None

    @property
    def _is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Continue a load that was interrupted, or begin the one that the recipe asks for."""
        section, (origin, cursor, lineage) = self._context.recipe.run, await self._read()
        if origin is not None:
            # interrupted: the cursor in Redis says where to continue
            if cursor < origin.last:
                await self._begin_load(LoadRequest(source=origin.source, version=origin.version))
        elif section.snapshot is not None:
            # a trainer has started without it: too late to load
            if lineage is not None:
                log.warning("run_began_without_its_snapshot", snapshot=section.snapshot)
                return
            await self._begin_load(LoadRequest(source=section.snapshot, version=section.fork_version))

    async def stop(self) -> None:
        """End the job. A save leaves no snapshot; the next start continues a load."""
        if self._task is not None:
            # both jobs may be cut anywhere: a save without a manifest is none, a load has its cursor in Redis
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)

    async def save(self, name: str) -> SnapshotInfo:
        """Begin to save.

        Raises:
            ConflictError: a snapshot of this name exists, or another job runs.
            StoreError
        """
        source = SnapshotSource(self._context.run, name)
        store = await self._store()
        # the manifest is written last: without one there is no snapshot, only leftovers
        if await in_thread(lambda: store.size_bytes(source.manifest_key)) is not None:
            raise ConflictError(f"snapshot {source} exists already; snapshots are never overwritten: give another name")
        # after the last await: no other job can begin between this check and the start
        self._check_idle()
        save = SnapshotSave(self._context, self._view, self._catalog, store, source)
        self._save, self._load = (source, save), None
        self._start(save.run(), what=f"saving snapshot {source}", wait="snapshot-save")
        return await self.info(name)

    async def load(self, request: LoadRequest) -> OriginInfo:
        """Begin to load; the same request again returns how far it is.

        Raises:
            ConflictError: the run began with something else, or another job runs.
        """
        origin, _, lineage = await self._read()
        is_loading = self._is_busy and self._load is not None and self._load[0] == request
        loaded = origin is not None and (origin.source, origin.version) == (request.source, request.version)
        if not is_loading:
            # a snapshot brings its lineages, whose numbers a run that has begun may have given out itself
            if not loaded and (origin is not None or lineage is not None):
                what = "a trainer" if origin is None else f"snapshot {origin.source}"
                raise ConflictError(f"run {self._context.run!r} has begun with {what}: choose another run.name")
            await self._begin_load(request)
        found = await self.origin()
        assert found is not None, "a load has begun"
        return found

    async def info(self, name: str) -> SnapshotInfo:
        """Return one snapshot of this run.

        Raises:
            NotFoundError: there is none of this name, and none is being saved.
            StoreError, MalformedError
        """
        source = SnapshotSource(self._context.run, name)
        if self._save is not None and self._save[0] == source and (self._is_busy or SAVE in self._failed):
            save, reason = self._save[1], None if self._is_busy else self._failed[SAVE]
            return SnapshotInfo(
                source=str(source),
                state="saving" if reason is None else "failed",
                reason=reason,
                num_rollouts=save.num_rollouts,
                num_written=save.writer.num_written,
                num_bytes=save.writer.num_bytes,
            )
        manifest, _ = await read_manifest(await self._store(), source)
        return SnapshotInfo(
            source=str(source),
            state="complete",
            log_position=manifest.log_position,
            num_rollouts=manifest.num_rollouts,
            num_written=manifest.num_rollouts,
            num_bytes=sum(stored.size_bytes for stored in manifest.objects),
        )

    async def origin(self) -> OriginInfo | None:
        """Return the snapshot that the run began with, or is to begin with; None when there is none."""
        origin, cursor, _ = await self._read()
        if origin is not None and cursor >= origin.last:
            return OriginInfo(
                source=origin.source,
                version=origin.version,
                state="complete",
                num_rollouts=origin.num_rollouts,
                num_checked=origin.num_rollouts,
                num_loaded=origin.num_rollouts,
                lineage=origin.lineage,
                start_params_sha256=origin.start_params_sha256,
            )
        if self._load is None:
            return None
        (request, load), failed = self._load, self._failed.get(LOAD)
        return OriginInfo(
            source=request.source,
            version=request.version,
            state="loading" if failed is None else "failed",
            reason=failed or self._load_problem,
            num_rollouts=load.progress.num_rollouts,
            num_checked=load.progress.num_checked,
            num_loaded=load.progress.num_loaded,
        )

    async def check_may_train(self) -> None:
        """Refuse a trainer while the run has not loaded the snapshot it is to begin with.

        Raises:
            UnavailableError: it is being loaded; try again.
            ConflictError: it could not be loaded.
        """
        origin = await self.origin()
        if origin is not None and origin.state == "loading":
            raise UnavailableError(f"snapshot {origin.source} is being loaded, {origin.num_loaded} rollouts so far")
        if origin is not None and origin.state == "failed":
            raise ConflictError(
                f"this run is to begin with snapshot {origin.source}, which could not be loaded: {origin.reason}"
            )
        section = self._context.recipe.run
        if origin is None and section.snapshot is not None:
            raise ConflictError(
                f"run.snapshot is {section.snapshot}, but run {section.name!r} has begun without it; remove that key, "
                "or choose another run.name"
            )

    async def _store(self) -> ObjectStore:
        if self._opened is None:
            self._opened = await in_thread(lambda: open_store(self._context.recipe.store))
        return self._opened

    async def _begin_load(self, request: LoadRequest) -> None:
        store = await self._store()
        self._check_idle()
        load = SnapshotLoad(
            self._context,
            catalog=self._catalog,
            lineages=self._lineages,
            evictor=self._evictor,
            store=store,
            request=request,
        )
        self._load, self._save, self._load_problem = (request, load), None, None
        self._start(self._keep_loading(load), what=f"loading snapshot {request.source}", wait="snapshot-load")

    async def _keep_loading(self, load: SnapshotLoad) -> None:
        """Load; while Redis or the store is away, wait for it."""
        while True:
            try:
                await load.run()
                return
            # an UnavailableError too, but waiting for it would never end
            except SupersededError:
                raise
            except (UnavailableError, StoreUnavailableError) as error:
                self._load_problem = str(error)
                log.warning("snapshot_load_waiting", error=self._load_problem)
            await asyncio.sleep(RETRY_S)

    def _check_idle(self) -> None:
        if self._is_busy:
            what = f"saving {self._save[0]}" if self._save is not None else "loading a snapshot"
            raise ConflictError(f"the buffer is {what} now; it does one such job at a time: try again later")

    def _start(self, job: Coroutine[Any, Any, object], *, what: str, wait: str) -> None:
        self._failed.pop(wait, None)
        self._task = asyncio.create_task(self._work(job, what, wait), name=what)

    async def _work(self, job: Coroutine[Any, Any, object], what: str, wait: str) -> None:
        log.info("snapshot_job_started", job=what)
        deadline_s = time.monotonic() + DEADLINE_S
        try:
            # shown as a wait of the buffer: a trainer or an operator waits for this job
            with self._components.waiting(OWNER, wait, deadline_s):
                async with asyncio.timeout(DEADLINE_S):
                    await job
        except TbaError as error:
            self._failed[wait] = str(error)
            log.warning("snapshot_job_failed", job=what, error=str(error))
        except TimeoutError:
            self._failed[wait] = f"{what} took more than {DEADLINE_S:.0f} s"
            log.warning("snapshot_job_failed", job=what, error=self._failed[wait])
        except asyncio.CancelledError:
            self._failed[wait] = "the buffer service is ending"
            raise
        # a defect must show in GET /v1/run, where somebody waits for the job
        except Exception as error:
            self._failed[wait] = f"{type(error).__name__}: {error}; the log of the buffer service has more"
            log.error("snapshot_job_failed", job=what, exc_info=error)
        else:
            log.info("snapshot_job_done", job=what)

    async def _read(self) -> tuple[OriginDocument | None, int, bytes | None]:
        """Return (origin, how far it is loaded, active lineage) as Redis has them."""
        run = await RunHash.read(self._context, "read the origin of the run")
        origin = run.raw.get(b"origin")
        document = None
        if origin is not None:
            key = self._context.keys.run
            document = needed(key, "origin", lambda: msgspec.json.decode(origin, type=OriginDocument))
        return document, run.origin_cursor, run.raw.get(b"lineage")
