"""Load a snapshot, so that a run begins with the buffer of another one.

    check      check every digest, rollout and prompt: a damaged snapshot changes nothing
    prompts    upload them in their order
    parts      load_snapshot.lua, in the order of the saved log: rollouts, and between them the newest publications, so
               that the same rollouts are recent as at the save

The progress is in Redis, written in the same atomic call as the loaded part: after a kill the next start continues
there. Loaded rollouts do not count as generated: they fulfil no visit, and flow control does not count them.

A read-only buffer shows a snapshot as it was saved: nothing is evicted, and the run stands at the step of the save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.api import LoadRequest
from tba.errors import ConflictError, MalformedError, WireError
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.wire import Rollout, decode_rollouts, encode_rollout
from tba.wire.codec import MAX_NAME_CHARS
from tba.wire.snapshot_manifest import SavedPublication, SnapshotManifest, SnapshotSource
from tba_buffer.eviction.evictor import Evictor
from tba_buffer.index.rollout_index import NUM_PUBLICATIONS_KEPT
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.rollouts.push import rollout_record
from tba_buffer.run.lineage import Lineages
from tba_buffer.snapshots.snapshot_format import SnapshotReader, read_manifest
from tba_buffer.storage.context import Context, RunHash, parse_cursor
from tba_buffer.storage.keys import FORMAT
from tba_buffer.storage.redis_client import redis_errors

PART_ROLLOUTS, PART_BYTES = 256, 4 << 20
PROMPTS_PER_UPLOAD = 1000


class OriginDocument(msgspec.Struct, frozen=True):
    """The snapshot that the run began with: field `origin` of the run hash. The first loaded part writes it.

    `last` is the position in the saved log at which the load is complete, `lineage` the last lineage of the snapshot.
    """

    source: str
    version: str | None
    manifest_sha256: str
    start_params_sha256: str | None
    num_rollouts: int
    lineage: int
    last: int


@dataclass(frozen=True, slots=True)
class Part:
    """Rollouts [N] (PLACE_DTYPE) or a publication, loaded in one call; it ends at `cursor` in the saved log."""

    places: NDArray[np.void]
    publication: SavedPublication | None
    cursor: int


class SnapshotLoad:
    """One load of a snapshot.

    Args:
        request: which snapshot, and the version to fork from, if any.
    """

    problem: str | None = None
    """Why the load waits, or last waited, for Redis or the object store."""
    reason: str | None = None
    """Why the load has failed."""
    num_rollouts: int | None = None
    num_checked, num_loaded = 0, 0

    def __init__(
        self,
        context: Context,
        *,
        catalog: Catalog,
        lineages: Lineages,
        evictor: Evictor,
        store: ObjectStore,
        request: LoadRequest,
    ) -> None:
        self._context, self._catalog, self._lineages, self._evictor = context, catalog, lineages, evictor
        self.request, self._store, self._source = request, store, SnapshotSource.parse(request.source)
        self._version = None if request.version is None else PolicyVersion.parse(request.version)

    async def run(self) -> None:
        """Load, or continue a load that was interrupted.

        Raises:
            NotFoundError: there is no such snapshot.
            ConflictError: the run has begun otherwise; or the snapshot has no publication of the version, another
                policy temperature, or a prompt that this run stores with other content.
            DigestError, MalformedError: the snapshot is damaged; nothing was changed.
            SupersededError: a newer buffer process owns the run.
            StoreError, UnavailableError: the store or Redis failed; the load can be repeated.
        """
        self.num_rollouts, self.num_checked, self.num_loaded = None, 0, 0
        manifest, digest = await read_manifest(self._store, self._source)
        if manifest.storage_format != FORMAT:
            raise ConflictError(
                f"snapshot {self._source} was saved by tba {manifest.tba_version} in storage format "
                f"{manifest.storage_format}, and this release reads format {FORMAT}: load it with that release"
            )
        wanted = self._context.recipe.model.policy_temperature
        if manifest.policy_temperature != wanted:
            raise ConflictError(
                f"snapshot {self._source} was saved with model.policy_temperature {manifest.policy_temperature:g}, and "
                f"this run has {wanted:g}: set that key"
            )
        end = self._end(manifest)
        reader = SnapshotReader(self._store, manifest)
        places = await reader.places()
        places = places[places["position"] <= end]
        origin = OriginDocument(
            source=str(self._source),
            version=None if self._version is None else str(self._version),
            manifest_sha256=digest,
            start_params_sha256=manifest.start_params_sha256,
            num_rollouts=len(places),
            lineage=max(manifest.lineages, default=0),
            last=end,
        )
        # refuse early what load_snapshot.lua would refuse after everything was read
        keys = self._context.keys
        with redis_errors("read the run"):
            async with self._context.redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.run)
                pipe.hget(keys.counters, "log_position")
                run, position = await pipe.execute()
        # only a run that stores nothing and has no trainer can begin with a snapshot
        begun = b"lineage" in run or int(position or 0) > 0
        if b"origin" in run:
            # the first part of this very load wrote it: continue
            begun = run[b"origin"] != msgspec.json.encode(origin)
        if begun:
            raise self._has_begun()
        self.num_rollouts = len(places)
        await self._check(reader, places)
        async for prompts in reader.prompts():
            # a load that continues uploads them again, which changes nothing
            for at in range(0, len(prompts), PROMPTS_PER_UPLOAD):
                await self._catalog.upload(prompts[at : at + PROMPTS_PER_UPLOAD])
        publications = [each for each in manifest.marks if each.position <= end][-NUM_PUBLICATIONS_KEPT:]
        await self._adopt(reader, origin, manifest, list(split_parts(places, publications, end)))

    def _end(self, manifest: SnapshotManifest) -> int:
        """Return the last position of the saved log to load; a fork ends before the publication of its version."""
        if self._version is None:
            return manifest.log_position
        publication = manifest.publication_of(self._version)
        if publication is None:
            known = ", ".join(each.version for each in manifest.marks[-8:]) or "none"
            raise ConflictError(
                f"snapshot {self._source} has no publication of version {self._version}, so it is unknown which "
                f"rollouts came before it; choose one of its newest publications: {known}"
            )
        # without the publication itself: the fork's trainer announces those weights under its own name
        return publication.position - 1

    def _has_begun(self) -> ConflictError:
        return ConflictError(
            f"run {self._context.run!r} has begun, but not with snapshot {self._source} as it is now; only a run that "
            "stores nothing and has no trainer yet can begin with one: choose another run.name"
        )

    async def _check(self, reader: SnapshotReader, places: NDArray[np.void]) -> None:
        """Read and check every prompt and rollout once. An object that the live table does not name is never read."""
        train = set()
        async for prompts in reader.prompts():
            for prompt in prompts:
                known = self._catalog.find(prompt.prompt_id)
                if known is not None and known[1] != prompt:
                    raise ConflictError(
                        f"prompt {prompt.prompt_id!r} of snapshot {self._source} has other content in this run; give "
                        "changed prompts a new id"
                    )
                if prompt.split == "train":
                    train.add(prompt.prompt_id)
        for part in split_parts(places, [], 0):
            for rollout in _documents(await reader.payloads(part.places)):
                if rollout.prompt_id not in train:
                    raise MalformedError(
                        f"snapshot {self._source}: rollout {rollout.rollout_id.hex()} answers prompt "
                        f"{rollout.prompt_id!r}, which is not a train prompt of the snapshot"
                    )
            self.num_checked += len(part.places)

    async def _adopt(
        self, reader: SnapshotReader, origin: OriginDocument, manifest: SnapshotManifest, parts: list[Part]
    ) -> None:
        context = self._context
        lineages = {str(number): lineage.model_dump_json() for number, lineage in manifest.lineages.items()}
        run = await RunHash.read(context, "read how far the load has come")
        # a damaged one ends the load with a ValueError: an UnavailableError would be waited for
        cursor = parse_cursor(run.raw.get(b"origin_cursor"))
        for part in parts:
            # loaded before the service was interrupted
            if part.cursor > cursor:
                payloads, records = self._rewrite(await reader.payloads(part.places))
                version = None if part.publication is None else part.publication.policy_version
                publications = [] if version is None else [f"{version.lineage} {version.step}"]
                reply = await context.scripts.run(
                    "load_snapshot",
                    *payloads,
                    origin=msgspec.json.encode(origin),
                    lineages=lineages,
                    last_lineage=origin.lineage,
                    forked_from=origin.version,
                    cursor=part.cursor,
                    records=b"".join(records),
                    publications=publications,
                )
                if reply == b"begun":
                    raise self._has_begun()
                if self._evictor.record_added(len(payloads), sum(map(len, payloads))):
                    await self._evictor.enforce()
            self.num_loaded += len(part.places)
        # load_snapshot.lua has written those of the snapshot
        await self._lineages.load()
        context.notify_all()

    def _rewrite(self, payloads: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return payloads [n], with the name of this run in them, and their log records [n]."""
        rewritten, records = [], []
        for payload, rollout in zip(payloads, _documents(payloads), strict=True):
            if rollout.run != self._context.run:
                # visits of two runs may have the same id: add the name of the other run
                visit_id = f"{rollout.visit_id}@{self._source.run}"[:MAX_NAME_CHARS]
                rollout = msgspec.structs.replace(rollout, run=self._context.run, visit_id=visit_id)
                payload = encode_rollout(rollout)
            found = self._catalog.find(rollout.prompt_id)
            assert found is not None, "its prompt was uploaded before"
            hashes_tokens = self._context.recipe.buffer.deduplicate
            rewritten.append(payload)
            records.append(rollout_record(rollout, found[0], len(payload), hashes_tokens=hashes_tokens))
        return rewritten, records


def split_parts(places: NDArray[np.void], publications: list[SavedPublication], end: int) -> Iterator[Part]:
    """Yield places and publications as parts, in the order of the saved log; a last, empty part reaches to `end`."""
    positions = places["position"].astype(np.int64)
    at = 0
    for publication in [*publications, None]:
        stop = len(places) if publication is None else int(np.searchsorted(positions, publication.position))
        while at < stop:
            total = np.cumsum(places["num_bytes"][at : min(stop, at + PART_ROLLOUTS)], dtype=np.int64)
            # a payload that is larger than a part has one of its own
            num = max(1, int(np.searchsorted(total, PART_BYTES, side="right")))
            yield Part(places[at : at + num], None, int(positions[at + num - 1]))
            at += num
        if publication is not None:
            yield Part(places[:0], publication, publication.position)
    # also of an empty snapshot: the last cursor says that the load is complete
    yield Part(places[:0], None, end)


def _documents(payloads: list[bytes]) -> list[Rollout]:
    rollouts = []
    for item in decode_rollouts(payloads):
        if isinstance(item, WireError):
            raise MalformedError(f"a rollout of the snapshot cannot be read: {item}")
        rollouts.append(item)
    return rollouts
