"""Weight versions in the store: publish, find, download, delete.

    runs/<run>/weights/<lineage>-<step>/model.safetensors   a version that is stored whole; written first, create-only;
                                        a large model in several files: model-00001-of-00003.safetensors, ...
    runs/<run>/weights/<lineage>-<step>/delta-00001-<digest>.safetensors   the changes against an older version
    runs/<run>/weights/<lineage>-<step>/adapter-<digest>.safetensors   a LoRA adapter for the starting model, 0-0
    runs/<run>/files/<sha256>/<name>                        config and tokenizer, shared by versions, named by content
    runs/<run>/weights/<lineage>-<step>/manifest.json       written last, create-only: it makes the version exist

Versions are immutable. A folder `<lineage>-<step>/` without a manifest was left by a trainer that was killed while it
wrote or deleted the version. Such a folder is no version; publishing the same version again completes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Unpack

from tba.api.run import RunInfo
from tba.errors import MalformedError, ObjectNotFoundError, OlderRedisError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import START, PolicyVersion
from tba.weights.digest import tensor_header
from tba.weights.node_cache import NodeCache
from tba.weights.publishing import MANIFEST_NAME, NewVersion, VersionWriter, version_prefix
from tba.weights.pulling import LocalVersion, VersionReader, damage_error
from tba.wire.weight_manifest import MAX_DELTAS, MAX_MANIFEST_BYTES, Manifest, decode_manifest, sha256_hex

_NUM_CACHED_MANIFESTS = 16
"""The manifest of a model of 20,000 tensors is 4 MB of JSON; reading it takes a second and 27 MB of memory."""
log = get_logger("weights")


def checkpoint_prefix(run: str) -> str:
    """Return the common prefix of the store keys of a run's checkpoints."""
    return f"runs/{run}/checkpoints/"


def complete_versions(store: ObjectStore, prefix: str) -> list[PolicyVersion]:
    """Return the versions whose folders under `prefix` have a manifest, oldest lineage first.

    Args:
        prefix: ends with a slash. Folders under it whose name is not a version are skipped, with a warning in the log.

    Raises:
        StoreUnavailableError
    """
    found: list[PolicyVersion] = []
    for key in store.list(prefix):
        name, _, rest = key.removeprefix(prefix).partition("/")
        if rest == MANIFEST_NAME:
            try:
                found.append(PolicyVersion.parse(name))
            except MalformedError:
                _note_foreign(f"{prefix}{name}")
    return sorted(found)


@lru_cache(maxsize=1000)
def _note_foreign(folder: str) -> None:
    # once for each of them: stores are listed again and again
    log.warning("folder_is_no_version", folder=folder)


def check_redis_is_newest(store: ObjectStore, run: str, read_run: Callable[[], RunInfo]) -> None:
    """Check that Redis knows the newest step whose version or checkpoint is in the store.

    Args:
        read_run: asks the buffer for the run. The store is listed first, so that steps made meanwhile are no gap.

    Raises:
        OlderRedisError: Redis lacks the step, and an accepted loss or a fork does not explain that. A trainer would
            repeat missing steps, and delete the versions that it does not know.
        StoreUnavailableError
    """
    prefixes = f"runs/{run}/weights/", checkpoint_prefix(run)
    newest = max(chain.from_iterable(complete_versions(store, prefix) for prefix in prefixes), default=START)
    info = read_run()
    known = PolicyVersion(info.lineage, info.step)
    # the steps of a loss that an operator has accepted stay unknown, and so do those that a fork copied
    may_lack_steps = info.num_lost_changes > 0 or (info.origin is not None and info.lineage <= info.origin.lineage)
    if newest.lineage > known.lineage or (newest > known and not may_lack_steps):
        raise OlderRedisError(
            f"{store.url} holds version {newest} of run {run!r}, and the newest step that Redis knows is {known}: the "
            "data of Redis was replaced, or is an older copy. Nothing was changed. Restore the data of Redis, or begin "
            "a run of another name with a snapshot (run.snapshot) or an exported model (`tba export`)"
        )


def incomplete_versions(
    store: ObjectStore, prefix: str, *, before_lineage: int, keep: Collection[PolicyVersion]
) -> dict[PolicyVersion, list[str]]:
    """Find the version folders under `prefix` that have no manifest, as a killed trainer leaves them.

    Args:
        prefix: ends with a slash; folders under it whose name is not a version are skipped.
        before_lineage: the lineage of a trainer that may be writing now; only folders of older lineages are returned.
        keep: versions that are never returned.

    Returns:
        Version -> the keys of all objects in its folder; the oldest version first.

    Raises:
        StoreUnavailableError
    """
    folders: dict[PolicyVersion, list[str]] = {}
    for key in store.list(prefix):
        try:
            version = PolicyVersion.parse(key.removeprefix(prefix).partition("/")[0])
        except MalformedError:
            continue
        folders.setdefault(version, []).append(key)
    return {
        version: keys
        for version, keys in sorted(folders.items())
        # an incomplete folder of the newest lineage may be one that a live trainer is writing now
        if f"{prefix}{version}/{MANIFEST_NAME}" not in keys and version.lineage < before_lineage and version not in keep
    }


def delete_incomplete(
    store: ObjectStore, prefix: str, *, before_lineage: int, keep: Collection[PolicyVersion]
) -> list[PolicyVersion]:
    """Delete every object that `incomplete_versions` finds; return the versions, oldest first."""
    found = incomplete_versions(store, prefix, before_lineage=before_lineage, keep=keep)
    for key in chain.from_iterable(found.values()):
        store.delete(key)
    return list(found)


INDEX_NAME = "model.safetensors.index.json"
"""Maps tensors to files; Hugging Face loaders read it if there are several files."""


class WeightVersions:
    """The weight versions of one run in one store.

    Args:
        cache: shared by the searchers of this machine, for downloads; None: no cache is used.
    """

    def __init__(self, store: ObjectStore, run: str, *, cache: NodeCache | None = None) -> None:
        self._store, self._run = store, run
        # versions are immutable; a large manifest has megabytes, and chains are walked again and again
        self._cached_manifest = lru_cache(_NUM_CACHED_MANIFESTS)(self.manifest)
        self._needed_bases: dict[PolicyVersion, PolicyVersion | None] = {}
        self._writer = VersionWriter(store, run, self.manifest)
        self._reader, self._cache = VersionReader(store, self._cached_manifest, cache), cache

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts since the start. `routes_failed`: routes of downloads that failed, also if a later route succeeded.
        `not_cached`: files that could not be added to the cache of this machine."""
        num_not_cached = 0 if self._cache is None else self._cache.num_not_cached
        return {"routes_failed": self._reader.num_failed, "not_cached": num_not_cached}

    def publish(self, **new: Unpack[NewVersion]) -> Manifest:
        """Store a version: its objects first, the manifest last.

        Publishing the same content again is accepted, and the first manifest stays. Tensors, files, dtype and parent
        are content. The canary, and whether the version is stored whole or as a delta, are not.

        Args:
            new: see `NewVersion`.

        Returns:
            The manifest that is in the store, which may be that of an earlier publication.

        Raises:
            ObjectExistsError: the version exists with other content.
            MalformedError: `config.json` is missing, one of `tensors_paths` is not a safetensors file, or a field is
                wrong.
            StoreUnavailableError
            OSError: the local disk is full.
        """
        manifest = self._writer.publish(new)
        self._needed_bases[new["version"]] = manifest.needed_base  # not read back by retention
        return manifest

    def manifest(self, version: PolicyVersion) -> Manifest:
        """Read the manifest of a version.

        Raises:
            ObjectNotFoundError: the version does not exist (yet).
            MalformedError: the document is too large, or is not a manifest of this run and version.
        """
        key = self._key(version, MANIFEST_NAME)
        if (size_bytes := self._store.size_bytes(key) or 0) > MAX_MANIFEST_BYTES:  # check before it fills the memory
            raise MalformedError(
                f"{key} in {self._store.url} has {size_bytes} bytes; the limit of a manifest is {MAX_MANIFEST_BYTES}"
            )
        try:
            manifest = decode_manifest(self._store.get(key))
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"weight version {version} of run {self._run} does not exist: there is no {key} in {self._store.url}"
            ) from None
        # a bucket that was copied or renamed by hand, for example
        if manifest.run != self._run or manifest.version != str(version):
            raise MalformedError(
                f"{key} in {self._store.url} is the manifest of version {manifest.version} of run {manifest.run}"
            )
        return manifest

    def exists(self, version: PolicyVersion) -> bool:
        """Return whether the manifest of a version is in the store."""
        return self._store.size_bytes(self._key(version, MANIFEST_NAME)) is not None

    def versions(self) -> list[PolicyVersion]:
        """Return every version that exists, oldest lineage first."""
        return complete_versions(self._store, f"runs/{self._run}/weights/")

    def bases(self, version: PolicyVersion) -> list[PolicyVersion]:
        """Return the older versions that `version` is assembled from, newest first, back to one that is whole.

        Raises:
            ObjectNotFoundError: the version, or one that it needs, does not exist.
            MalformedError, StoreUnavailableError
        """
        found: list[PolicyVersion] = []
        while True:
            newest = found[-1] if found else version
            if newest not in self._needed_bases:
                self._needed_bases[newest] = self.manifest(newest).needed_base
            if (base := self._needed_bases[newest]) is None:
                return found
            if len(found) == MAX_DELTAS:
                raise MalformedError(f"weight version {version} needs more than {MAX_DELTAS} deltas")
            found.append(base)

    def needed_by(self, held: Iterable[PolicyVersion]) -> set[PolicyVersion]:
        """Return the held versions and all versions needed to assemble them.

        If the manifest of one cannot be parsed, all existing versions older than that one count as needed.

        Raises:
            StoreUnavailableError
        """
        needed = set(held)
        for version in tuple(needed):
            try:
                needed.update(self.bases(version))
            except ObjectNotFoundError:  # a version that was named and never published, or deleted by hand
                continue
            except MalformedError as error:  # of a newer release, perhaps: it may need any older version
                log.warning("needed_versions_unknown", version=str(version), error=str(error))
                needed.update(older for older in self.versions() if older < version)
        return needed

    def download_model(
        self, version: PolicyVersion, folder: Path, *, held: Sequence[LocalVersion] = (), keeps_base: bool = False
    ) -> LocalVersion:
        """Download all files of a version into `folder`, where they appear after all are verified.

        A version of several tensor files gets an index (`write_index`).

        Args:
            held, keeps_base: as in `download_tensors`.

        Raises:
            ObjectNotFoundError: the version does not exist.
            DigestError, MalformedError: an object, which the message names, is not what the manifest says.
        """
        manifest = self.manifest(version)
        local = self._reader.download(manifest, folder, held=held, files=manifest.files, keeps_base=keeps_base)
        if len(local.paths) > 1:
            write_index(folder, local.paths)
        return local

    def download_tensors(
        self,
        version: PolicyVersion,
        folder: Path,
        *,
        held: Sequence[LocalVersion] = (),
        like: Manifest | None = None,
        keeps_base: bool = False,
    ) -> LocalVersion:
        """Write the tensor files of a version into `folder`, where they appear after every tensor is verified.

        Args:
            held: versions whose files are on this machine, which deltas may start from; the files are only read.
            like: another version of the model; if tensors differ in name, dtype or shape, nothing is downloaded.
            keeps_base: keep a starting model that had to be downloaded for an adapter in a subfolder of `folder`, for
                the next adapter (`LocalVersion.base`).

        Raises:
            ObjectNotFoundError, DigestError, MalformedError: every route has failed; this is the first route's error.
            StoreUnavailableError: the store is away, or the local disk is full.
        """
        manifest = self.manifest(version)
        # a small delta may unfold to any size that its manifest names
        if like is not None and (other := sorted(_layout(manifest) ^ _layout(like))):
            raise MalformedError(
                f"weight version {version} is of another model than {like.version}: {len(other)} tensors differ, "
                f"first {other[0]}"
            )
        return self._reader.download(manifest, folder, held=held, keeps_base=keeps_base)

    def read_file(self, version: PolicyVersion, name: str) -> bytes | None:
        """Return the verified bytes of a file of a version (config, tokenizer); None if the version has no such file.

        Raises:
            ObjectNotFoundError: the version does not exist.
            DigestError: the bytes are not what the manifest says.
        """
        stored = next((file for file in self.manifest(version).files if file.name == name), None)
        if stored is None:
            return None
        if (size_bytes := self._store.size_bytes(stored.key)) not in (None, stored.size_bytes):  # it may be huge
            raise damage_error(self._store, stored, f"{size_bytes} bytes")
        data = self._store.get(stored.key)
        if (found := sha256_hex(data)) != stored.sha256:
            raise damage_error(self._store, stored, f"{len(data)} bytes with digest {found}")
        return data

    def delete(self, version: PolicyVersion) -> None:
        """Delete a version, manifest first, so that none exists without its tensors. Shared files (tokenizer) stay."""
        # a reader that has the manifest already misses an object soon, which it takes for a version that is gone
        self._store.delete(self._key(version, MANIFEST_NAME))
        for key in self._store.list(self._key(version, "")):
            self._store.delete(key)

    def delete_incomplete(self, *, before_lineage: int, keep: Collection[PolicyVersion] = ()) -> list[PolicyVersion]:
        """Delete the objects of versions that `incomplete_versions` finds; return these versions, oldest first."""
        prefix = f"runs/{self._run}/weights/"
        return delete_incomplete(self._store, prefix, before_lineage=before_lineage, keep=keep)

    def _key(self, version: PolicyVersion, name: str) -> str:
        return version_prefix(self._run, version) + name


def _layout(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.tensors}


def write_index(folder: Path, tensors_paths: Sequence[Path]) -> None:
    """Write `model.safetensors.index.json` into `folder`: which of its safetensors files holds each tensor."""
    files = {name: path.name for path in tensors_paths for name in tensor_header(path)}
    size_bytes = sum(path.stat().st_size for path in tensors_paths)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": files}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")
