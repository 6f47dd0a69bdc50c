"""Background jobs that save and load snapshots: one at a time, shown as a wait in GET /v1/run while they run.

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
from tba_buffer.snapshots.save import SnapshotSave, taken
from tba_buffer.snapshots.snapshot_format import read_manifest
from tba_buffer.storage.context import Context, RunHash, needed

OWNER = "buffer"
DEADLINE_S = 3600.0
STOP_TIMEOUT_S = 5.0
RETRY_S = 2.0
log = get_logger("snapshots")


class SnapshotJobs:
    """Saves snapshots of this run, and loads the snapshot that the run begins with."""

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
        self._job: SnapshotSave | SnapshotLoad | None = None
        """The running job, or the last one."""

    @property
    def is_saving(self) -> bool:
        """Whether a snapshot is being written: the log must not be compacted then."""
        return self._is_busy and isinstance(self._job, SnapshotSave)

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
        """Cancel the job. A cancelled save leaves no snapshot; the next start of the service continues a load."""
        if self._task is not None:
            # both jobs may be cut anywhere: a save without a manifest is none, a load has its cursor in Redis
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)

    async def save(self, name: str) -> SnapshotInfo:
        """Begin to save a snapshot in the background, and return its progress.

        Raises:
            ConflictError: a snapshot of this name exists, or another job runs.
            StoreError: the object store failed.
        """
        source = SnapshotSource(self._context.run, name)
        store = await self._store()
        # the manifest is written last: without one there is no snapshot, only leftovers
        if await in_thread(lambda: store.size_bytes(source.manifest_key)) is not None:
            raise taken(source)
        # after the last await: no other job can begin between this check and the start
        self._check_idle()
        save = SnapshotSave(self._context, self._view, self._catalog, store, source)
        self._start(save, save.run(), what=f"saving snapshot {source}", wait="snapshot-save")
        return await self.info(name)

    async def load(self, request: LoadRequest) -> OriginInfo:
        """Begin to load a snapshot in the background, and return the progress. A repeated request continues the load.

        Raises:
            ConflictError: the run began with a trainer or another snapshot, or another job runs.
        """
        origin, _, lineage = await self._read()
        is_loading = self._is_busy and isinstance(self._job, SnapshotLoad) and self._job.request == request
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
            NotFoundError: no snapshot of this name exists or is being saved.
            StoreError, MalformedError: the object store failed, or the manifest is damaged.
        """
        source = SnapshotSource(self._context.run, name)
        save = self._job
        if isinstance(save, SnapshotSave) and save.source == source and (self._is_busy or save.reason is not None):
            return SnapshotInfo(
                source=str(source),
                state="saving" if self._is_busy else "failed",
                reason=save.reason,
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
        """Return the snapshot that the run began with, or is loading, with the progress; None when there is none."""
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
        load = self._job
        if not isinstance(load, SnapshotLoad):
            return None
        return OriginInfo(
            source=load.request.source,
            version=load.request.version,
            state="loading" if load.reason is None else "failed",
            reason=load.reason or load.problem,
            num_rollouts=load.num_rollouts,
            num_checked=load.num_checked,
            num_loaded=load.num_loaded,
        )

    async def check_may_train(self) -> None:
        """Refuse a trainer until the run has loaded the snapshot that it is to begin with.

        Raises:
            UnavailableError: the snapshot is being loaded; try again.
            ConflictError: the snapshot could not be loaded, or the run began without it.
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
        self._start(load, self._keep_loading(load), what=f"loading snapshot {request.source}", wait="snapshot-load")

    async def _keep_loading(self, load: SnapshotLoad) -> None:
        """Load; while Redis or the object store is away, try again every RETRY_S."""
        while True:
            try:
                await load.run()
                return
            # an UnavailableError too, but waiting for it would never end
            except SupersededError:
                raise
            except (UnavailableError, StoreUnavailableError) as error:
                load.problem = str(error)
                log.warning("snapshot_load_waiting", error=load.problem)
            await asyncio.sleep(RETRY_S)

    def _check_idle(self) -> None:
        if self._is_busy:
            job = self._job
            what = f"saving {job.source}" if isinstance(job, SnapshotSave) else "loading a snapshot"
            raise ConflictError(f"the buffer is {what} now; it does one such job at a time: try again later")

    def _start(
        self, job: SnapshotSave | SnapshotLoad, work: Coroutine[Any, Any, object], *, what: str, wait: str
    ) -> None:
        self._job = job
        self._task = asyncio.create_task(self._work(job, work, what, wait), name=what)

    async def _work(
        self, job: SnapshotSave | SnapshotLoad, work: Coroutine[Any, Any, object], what: str, wait: str
    ) -> None:
        log.info("snapshot_job_started", job=what)
        deadline_s = time.monotonic() + DEADLINE_S
        try:
            # shown as a wait of the buffer: a trainer or an operator waits for this job
            with self._components.waiting(OWNER, wait, deadline_s):
                async with asyncio.timeout(DEADLINE_S):
                    await work
        except TbaError as error:
            job.reason = str(error)
        except TimeoutError:
            job.reason = f"{what} took more than {DEADLINE_S:.0f} s"
        except asyncio.CancelledError:
            job.reason = "the buffer service is ending"
            raise
        # a defect must show in GET /v1/run, where somebody waits for the job
        except Exception as error:
            job.reason = f"{type(error).__name__}: {error}; the log of the buffer service has more"
            log.exception("snapshot_job_defect", job=what)
        if job.reason is None:
            log.info("snapshot_job_done", job=what)
        else:
            log.warning("snapshot_job_failed", job=what, error=job.reason)

    async def _read(self) -> tuple[OriginDocument | None, int, bytes | None]:
        """Read from Redis the origin, the position up to which its saved log is loaded, and the active lineage."""
        run = await RunHash.read(self._context, "read the origin of the run")
        origin = run.raw.get(b"origin")
        document = None
        if origin is not None:
            key = self._context.keys.run
            document = needed(key, "origin", lambda: msgspec.json.decode(origin, type=OriginDocument))
        return document, run.origin_cursor, run.raw.get(b"lineage")
