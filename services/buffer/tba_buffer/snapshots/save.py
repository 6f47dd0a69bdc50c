"""Save a snapshot: the rollouts live at one log position, while pushes, evictions and re-scoring continue.

    pass 1        write every live payload
    pass 2, 3 ..  write rollouts that were pushed or scored again during the pass before, until little is left
    last pass     the same under `context.mutation_lock`: nothing is evicted or scored again, but pushes continue. The
                  snapshot is of this pass's log position: its live table names exactly the rollouts live there
    end           write live table, prompts, and last the manifest

Damaged rollouts are left out: a snapshot that held them could not be loaded.

The log tells which rollouts were scored again, because a new payload may have the old reward and size. So the log must
not be cut during a save: the buffer does not compact it then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
from numpy.typing import NDArray

import tba
from tba.concurrency import in_thread
from tba.errors import (
    ConflictError,
    MalformedError,
    ObjectExistsError,
    ObjectNotFoundError,
    UnavailableError,
    WireError,
)
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import START
from tba.weights import WeightVersions
from tba.wire import Rollout, StoredObject, decode_rollouts
from tba.wire.snapshot_manifest import (
    SavedLineage,
    SavedPublication,
    SnapshotManifest,
    SnapshotSource,
    encode_snapshot_manifest,
)
from tba_buffer.index.log import FAILED, PENDING, SCORED, Rescored, parse_entry
from tba_buffer.index.log_follower import IndexView
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.snapshots.snapshot_format import OBJECT_BYTES, ROWS_PER_TABLE, SnapshotWriter, encode_places
from tba_buffer.storage.context import Context, RunHash
from tba_buffer.storage.keys import FORMAT
from tba_buffer.storage.redis_client import redis_errors

READ_ROLLOUTS, READ_BYTES = 512, 4 << 20
LITTLE_BYTES = OBJECT_BYTES // 2
MAX_PASSES = 8
HELD_BYTES = 256 << 20
"""Most bytes that the last pass may hold in memory, if more than LITTLE_BYTES are left after MAX_PASSES."""
LOG_ENTRIES_PER_READ = 500
PROMPTS_PER_READ = 1000
log = get_logger("snapshots")

LIVE_DTYPE = np.dtype([("position", "<u8"), ("rollout_id", "V16"), ("num_bytes", "<u4"), ("status", "u1")])
"""A live rollout, copied from the index; arrays are by ascending position."""
Live = NDArray[np.void]


class SnapshotSave:
    """One attempt to save one snapshot."""

    reason: str | None = None
    """Why the save has failed."""
    num_rollouts: int | None = None
    """Number of live rollouts; None before the first pass."""

    def __init__(
        self, context: Context, view: IndexView, catalog: Catalog, store: ObjectStore, source: SnapshotSource
    ) -> None:
        self._context, self._view, self._catalog = context, view, catalog
        self._store, self.source = store, source
        self.writer = SnapshotWriter(store, source.prefix)
        self._damaged: set[int] = set()
        """Log positions of the damaged rollouts, which are left out."""

    async def run(self) -> SnapshotManifest:
        """Delete the objects of an earlier failed attempt, save, and return the manifest, which is stored last.

        Raises:
            ConflictError: a snapshot of this name exists, or appeared meanwhile.
            SupersededError: a newer buffer process owns the run.
            StoreError, UnavailableError: the store or Redis failed; there is no snapshot to load.
        """
        await in_thread(self._delete_leftovers)
        position = 0
        # each pass is shorter than the one before, unless rollouts arrive faster than the store takes them
        for left in reversed(range(MAX_PASSES)):
            live, end = await self._live()
            due = await self._due(live, since=position, until=end)
            position = end
            self.num_rollouts = len(live)
            async for at, payload in self._payloads(due, is_last=False):
                await self.writer.add(at, payload)
            await self.writer.flush()
            async with self._context.mutation_lock:
                live, end = await self._live()
                due = await self._due(live, since=position, until=end)
                # little is left: read under the lock, so that all of it is of one position
                if int(due["num_bytes"].sum()) <= (LITTLE_BYTES if left else HELD_BYTES):
                    rest = [found async for found in self._payloads(due, is_last=True)]
                    run, lineages, publications = await self._read_run(end)
                    num_prompts = len(self._catalog.ids)
                    break
        else:
            raise UnavailableError(
                f"rollouts arrive faster than the store takes them: {int(due['num_bytes'].sum())} bytes are unwritten "
                f"after {MAX_PASSES} passes; save again while fewer are pushed"
            )
        # written without the lock: a push that must evict waits for it, and a store can be slow
        for at, payload in rest:
            await self.writer.add(at, payload)
        await self.writer.flush()
        live = live[~np.isin(live["position"], np.array(sorted(self._damaged), dtype=np.uint64))]
        self.num_rollouts = len(live)
        places = self.writer.places()
        # written by an earlier pass, and evicted since
        places = places[np.isin(places["position"], live["position"])]
        assert len(places) == len(live), "every live rollout that can be read was written"
        manifest = SnapshotManifest(
            run=self._context.run,
            name=self.source.name,
            log_position=end,
            created_at_s=self._context.clock(),
            tba_version=tba.__version__,
            storage_format=FORMAT,
            lineage=run.lineage,
            step=run.step,
            latest_version=run.latest_version,
            lineages=lineages,
            marks=publications,
            num_scored=int((live["status"] == SCORED).sum()),
            num_pending=int((live["status"] == PENDING).sum()),
            num_failed=int((live["status"] == FAILED).sum()),
            num_prompts=num_prompts,
            policy_temperature=self._context.recipe.model.policy_temperature,
            start_params_sha256=await in_thread(self._start_params),
            rollouts=self.writer.objects,
            live=[
                await self.writer.put("live", number, "msgpack", [encode_places(places[at : at + ROWS_PER_TABLE])])
                for number, at in enumerate(range(0, len(places), ROWS_PER_TABLE))
            ],
            prompts=await self._prompts(num_prompts),
        )
        # a newer owner may have evicted meanwhile what this snapshot says is live
        await self._context.epoch.check()
        data = encode_snapshot_manifest(manifest)
        try:
            await in_thread(lambda: self._store.put(self.source.manifest_key, data, create_only=True))
        except ObjectExistsError:
            raise taken(self.source) from None
        return manifest

    def _delete_leftovers(self) -> None:
        # an interrupted attempt leaves objects that no manifest names
        keys = self._store.list(self.source.prefix)
        if self.source.manifest_key in keys:
            raise taken(self.source)
        for key in keys:
            self._store.delete(key)

    async def _live(self) -> tuple[Live, int]:
        """Return the rollouts live now, and the log position of the index now."""
        index = await self._view.catch_up()
        rows = index.live_rows()
        live = np.zeros(len(rows), dtype=LIVE_DTYPE)
        for name in LIVE_DTYPE.names or ():
            live[name] = index.column(name, rows)
        return live, index.position

    async def _due(self, live: Live, *, since: int, until: int) -> Live:
        """Return the live rollouts that were pushed or scored again after the log position `since`."""
        # the positions that log entries in (since, until] gave a new reward; the first pass (0) writes everything
        context, again, after = self._context, [np.zeros(0, dtype=np.uint64)], since or until
        while after < until:
            with redis_errors("read the log"):
                async with context.redis.pipeline(transaction=True) as pipe:
                    pipe.hget(context.keys.log_checkpoint, "position")
                    pipe.xrange(context.keys.log, f"({after}-0", f"{until}-0", LOG_ENTRIES_PER_READ)
                    base, entries = await pipe.execute()
            # this process does not compact the log while it saves: another one did
            if int(base or 0) > after:
                raise UnavailableError("the log was cut while the snapshot was written; save it again")
            if not entries:
                break
            for entry_id, fields in entries:
                event = parse_entry(entry_id, fields)
                if isinstance(event, Rescored):
                    again.append(event.changes["position"])
                after = int(entry_id.split(b"-")[0])
        return live[(live["position"] > since) | np.isin(live["position"], np.concatenate(again))]

    async def _payloads(self, due: Live, *, is_last: bool) -> AsyncIterator[tuple[int, bytes]]:
        """Yield log positions and payloads of `due`; evicted rollouts are left out, and damaged ones noted."""
        for rows in _read_sizes(due["num_bytes"]):
            ids = [rollout_id.tobytes() for rollout_id in due["rollout_id"][rows]]
            with redis_errors("read rollouts"):
                payloads = await self._context.redis.hmget(self._context.keys.payloads, ids)
            readable = await in_thread(lambda ids=ids, payloads=payloads: self._readable(ids, payloads))
            for position, payload, is_good in zip(due["position"][rows].tolist(), payloads, readable, strict=True):
                # a damaged payload is left out; an evicted one is no part of the snapshot any more
                if is_good:
                    yield position, payload
                elif payload is not None:
                    self._damaged.add(position)
                elif is_last:  # under `context.mutation_lock` nothing is evicted
                    raise UnavailableError(
                        f"the rollout at log position {position} disappeared while nothing may be evicted: another "
                        "buffer process changes this run; save again when only one is left"
                    )

    def _readable(self, ids: list[bytes], payloads: list[bytes | None]) -> list[bool]:
        """Return which payloads can be loaded again: they can be read, and their prompt is known. [n]"""
        items = iter(decode_rollouts([payload for payload in payloads if payload is not None]))
        found = []
        for rollout_id, payload in zip(ids, payloads, strict=True):
            item = None if payload is None else next(items)
            if isinstance(item, WireError):
                log.warning("damaged_rollout", rollout_id=rollout_id.hex(), reason=str(item))
            found.append(
                isinstance(item, Rollout)
                and item.rollout_id == rollout_id
                and self._catalog.find(item.prompt_id) is not None
            )
        return found

    async def _read_run(self, end: int) -> tuple[RunHash, dict[int, SavedLineage], list[SavedPublication]]:
        """Return the run, its lineages, and its publications up to the log position `end`."""
        context, keys = self._context, self._context.keys
        with redis_errors("read the run"):
            async with context.redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.run)
                pipe.hgetall(keys.lineages)
                pipe.hgetall(keys.announced)
                raw, lineages, announced = await pipe.execute()
        # Redis keeps them by version; the index has the newest ones, also those of a version that was announced twice
        known = {(int(at), version.decode()) for version, at in announced.items()}
        known |= {(each.position, str(each.version)) for each in self._view.index.publications}
        return (
            RunHash(context, raw),
            {int(number): SavedLineage.model_validate_json(text) for number, text in lineages.items()},
            [SavedPublication(position=at, version=version) for at, version in sorted(known) if at <= end],
        )

    async def _prompts(self, num_prompts: int) -> list[StoredObject]:
        """Write the first `num_prompts` prompts as JSON lines, in upload order."""
        objects: list[StoredObject] = []
        lines: list[bytes] = []
        for at in range(0, num_prompts, PROMPTS_PER_READ):
            ids = self._catalog.ids[at : min(at + PROMPTS_PER_READ, num_prompts)]
            with redis_errors("read the prompts"):
                lines += [text + b"\n" for text in await self._context.redis.hmget(self._context.keys.prompts, ids)]
            if sum(map(len, lines)) > OBJECT_BYTES or at + PROMPTS_PER_READ >= num_prompts:
                objects.append(await self.writer.put("prompts", len(objects), "jsonl", lines))
                lines = []
        return objects

    def _start_params(self) -> str | None:
        try:
            return WeightVersions(self._store, self._context.run).manifest(START).params_sha256
        except ObjectNotFoundError:  # nothing is published yet
            return None
        except MalformedError as error:
            raise ConflictError(f"the snapshot cannot say which model this run starts from: {error}") from None


def _read_sizes(num_bytes: NDArray[np.uint32]) -> Iterator[slice]:
    """Yield slices of rows to read at once: at most READ_ROLLOUTS rows, and READ_BYTES bytes or a single row."""
    at = 0
    while at < len(num_bytes):
        total = np.cumsum(num_bytes[at : at + READ_ROLLOUTS], dtype=np.int64)
        end = at + max(1, int(np.searchsorted(total, READ_BYTES, side="right")))
        yield slice(at, end)
        at = end


def taken(source: SnapshotSource) -> ConflictError:
    """Return the error for a snapshot that exists already."""
    return ConflictError(f"snapshot {source} exists already; snapshots are never overwritten: give another name")
