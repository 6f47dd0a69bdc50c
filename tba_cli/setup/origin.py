"""The origin of a run: a snapshot of another run's buffer and, for a fork, one of its weight versions.

    looked for in    the store of the new run, then the store of the local run of that name (runs/RUN/config.json)
    copied           to the store of the new run, under the same keys, unless it is there already: the manifest last

So the new run has everything that it needs, and the other run may be deleted.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tba.api import OriginInfo
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, WaitTimeoutError
from tba.store import ObjectStore, open_store
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire.checkpoint_manifest import checkpoint_objects
from tba.wire.snapshot_manifest import SnapshotManifest, SnapshotSource, decode_snapshot_manifest
from tba_cli.console import Console
from tba_cli.run_folder import RunFolder

POLL_S = 0.5
PROGRESS_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Origin:
    """A snapshot in `store`, and the version to fork from, if any."""

    source: SnapshotSource
    version: PolicyVersion | None
    store: ObjectStore
    manifest: SnapshotManifest

    def object_keys(self) -> Iterator[str]:
        """Yield the key of every object that the new run needs; each manifest comes after the objects that it names."""
        yield from (stored.key for stored in self.manifest.objects)
        if self.version is not None:
            prefix = f"runs/{self.source.run}"
            versions = WeightVersions(self.store, self.source.run)
            # with the versions that it is assembled from, where it is stored as a delta or an adapter
            for version in (*reversed(versions.bases(self.version)), self.version):
                manifest = versions.manifest(version)
                yield from (stored.key for stored in (*manifest.full, *manifest.changes, *manifest.files))
                yield f"{prefix}/weights/{version}/manifest.json"
            checkpoint = f"{prefix}/checkpoints/{self.version}"
            if self.store.size_bytes(f"{checkpoint}/manifest.json") is not None:
                yield from checkpoint_objects(checkpoint, self.store.get(f"{checkpoint}/manifest.json"))
                yield f"{checkpoint}/manifest.json"
        # manifests last: a copy that is cut short is no snapshot
        yield self.source.manifest_key


def check_searchers(recipe: Recipe) -> None:
    """Raise ConfigError if a local run would have no rollouts to train on, or if searchers would share a server."""
    if recipe.is_offline and recipe.run.snapshot is None:
        raise ConfigError(
            "searcher.num_searchers is 0, so nothing would ever be generated: begin with the rollouts of another run "
            "(`tba buffer save NAME RUN`, then --buffer RUN/NAME), or set searcher.num_searchers"
        )
    num = recipe.searcher.num_searchers
    if recipe.searcher.engine == "openai" and num > 1:
        raise ConfigError(
            f"searcher.num_searchers is {num}, and all would use the server {recipe.searcher.openai.url}: each needs "
            "one of its own; set it to 1, and start further searchers yourself with TBA_SEARCHER__OPENAI__URL"
        )


def check_origin(recipe: Recipe) -> None:
    """Raise ConfigError if the origin is the run itself, or a fork would have no steps; only the recipe is read."""
    if recipe.run.snapshot is None:
        return
    if SnapshotSource.parse(recipe.run.snapshot).run == recipe.run.name:
        raise ConfigError(f"run {recipe.run.name!r} cannot begin with a snapshot of itself: give it another name")
    version = None if recipe.run.fork_version is None else PolicyVersion.parse(recipe.run.fork_version)
    if version is not None and recipe.trainer.num_steps <= version.step:
        raise ConfigError(
            f"trainer.num_steps is {recipe.trainer.num_steps}, and the fork begins at step {version.step}: its steps "
            "count from there, so set trainer.num_steps above it"
        )


def find_origin(recipe: Recipe, store: ObjectStore, *, runs_dir: Path) -> Origin | None:
    """Find the origin that the recipe names, and return it; None if it names none."""
    if recipe.run.snapshot is None:
        return None
    check_origin(recipe)
    source = SnapshotSource.parse(recipe.run.snapshot)
    key, places = source.manifest_key, [store]
    if store.size_bytes(key) is None and (local := store_of_run(RunFolder(runs_dir / source.run))) is not None:
        places.append(local)
    found = places[-1]
    if found.size_bytes(key) is None:
        raise ConfigError(
            f"there is no snapshot {source} in {' or '.join(place.url for place in places)}; make it with "
            f"`tba buffer save {source.name} {source.run}`"
        )
    manifest, needed = decode_snapshot_manifest(found.get(key), key=key), recipe.sampling.min_size_to_sample
    if recipe.is_offline and manifest.num_scored + manifest.num_pending < needed:
        raise ConfigError(
            f"snapshot {source} holds {manifest.num_scored} scored rollouts, and sampling.min_size_to_sample is "
            f"{needed}: without searchers no batch could ever be drawn"
        )
    if recipe.run.fork_version is None:
        return Origin(source, None, found, manifest)
    version = PolicyVersion.parse(recipe.run.fork_version)
    check_version(found, source.run, version)
    # the position of its publication says which rollouts are older than the fork
    if manifest.publication_of(version) is None:
        raise ConfigError(f"snapshot {source} was saved before version {version} was announced; save another one")
    return Origin(source, version, found, manifest)


def copy_origin(origin: Origin, store: ObjectStore) -> int:
    """Copy the origin to the store of the run; return the number of copied objects, 0 if it is there already."""
    # the run's own store has it: nothing to copy
    if origin.store.url == store.url:
        return 0
    num_objects = 0
    with tempfile.TemporaryDirectory(prefix="tba-origin-") as folder:
        path = Path(folder) / "object"
        for key in origin.object_keys():
            origin.store.get_file(key, path)
            store.put_file(key, path)
            num_objects += 1
    return num_objects


async def until_loaded(client: BufferClient, console: Console, *, silence_s: float) -> OriginInfo:
    """Wait (wait `snapshot-load`) until the buffer has loaded the snapshot that the run begins with.

    Args:
        silence_s: longest time without progress; the load as a whole has no deadline.

    Raises:
        WaitTimeoutError: there was no progress for `silence_s`.
    """
    moved_s = shown_s = time.monotonic()
    before: tuple[int, int] | None = None
    while True:
        origin = (await asyncio.to_thread(client.run)).origin
        if origin is None or origin.state == "failed":
            reason = "the buffer does not know it" if origin is None else origin.reason
            raise ConfigError(f"the buffer could not load the snapshot: {reason}")
        if origin.state == "complete":
            return origin
        now, progress = time.monotonic(), (origin.num_checked, origin.num_loaded)
        if progress != before:
            # a large snapshot takes long, and is fine as long as it moves
            moved_s, before = now, progress
        elif now - moved_s > silence_s:
            raise WaitTimeoutError(
                f"wait 'snapshot-load': nothing moved for {silence_s:.0f} s ({origin.reason or 'for no known reason'})"
            )
        if now - shown_s > PROGRESS_INTERVAL_S:
            shown_s = now
            console.info(
                f"loading {origin.source}: {origin.num_checked} rollouts checked, {origin.num_loaded} loaded, of "
                f"{'?' if origin.num_rollouts is None else origin.num_rollouts}"
            )
        await asyncio.sleep(POLL_S)


def store_of_run(folder: RunFolder) -> ObjectStore | None:
    """Return the store of a local run, or None if no run was started in the folder."""
    # config.json has the address that its services were given: a relative one lies in the run folder
    if not folder.config_path.exists():
        return None
    return open_store(load_recipe(folder.config_path, environ={}).store)


def check_version(store: ObjectStore, run: str, version: PolicyVersion) -> None:
    """Raise ConfigError if the store does not have this weight version of the run."""
    versions = WeightVersions(store, run)
    if not versions.exists(version):
        # the newest few: a run may have thousands
        newest = ", ".join(map(str, versions.versions()[-8:])) or "none"
        raise ConfigError(
            f"run {run!r} has no weight version {version} in {store.url} (any more: trainer.keep_versions); the newest "
            f"are {newest}"
        )
