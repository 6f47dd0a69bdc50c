"""Pull a version: download it from the store with few bytes, assemble its files, and verify every tensor.

    notice       read the newest version from the reply to a lease or a push: `tba_searcher.loop`
    pull         download in a thread while generation continues: `tba_searcher.generation.version_pulls`
    manifest     read the manifest: `WeightVersions.download_tensors`, in repository.py
    cache        take the files that another searcher of this machine has made: `_by_cache`, node_cache.py
    route        choose a start and what is applied to it (`_routes`): a version stored whole, or one whose files are on
                 this machine, with the deltas up to the wanted version; or the starting model with an adapter
    objects      download the objects, check size and digest: `_get`
    files        write the tensors, check their digests: `assemble` (deltas) or `merge` (an adapter)
    stage, swap  load between two decode steps, check parameters and canary: `tba_searcher.engines.weight_check`

When a route fails (damage, a gap, a delta for another base), the next one is tried. Routes from versions stored whole
come last, so a wrong file on this machine never blocks a version. Several threads work on one tensor each, and only
these tensors are in memory at once.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, StoreError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.store.file import explain_full_disk
from tba.versions import PolicyVersion
from tba.weights.adapter import merge_into, read_adapter
from tba.weights.delta import SEGMENT_ELEMENTS, apply_tensor
from tba.weights.digest import (
    RawTensor,
    check_tensors_of,
    digest_of_file,
    in_parallel,
    open_tensors,
    sha256_of_file,
    tensor_digest,
)
from tba.weights.node_cache import NodeCache
from tba.wire.weight_manifest import (
    DTYPE_BYTES,
    MAX_DELTAS,
    Adapter,
    DeltaObject,
    Manifest,
    StoredObject,
    TensorEntry,
    TensorFile,
    table_sha256,
)

_MAX_SEARCHED = 32
"""Most deltas of a route from a version on this machine. Each costs a request to the store, for its manifest."""
_MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file that its library reads."""
_REMEDY = "pull again; if the error remains, delete the version"
log = get_logger("weights")


@dataclass(frozen=True, slots=True)
class LocalVersion:
    """One version whose tensors are in local files, every digest verified."""

    version: PolicyVersion
    paths: tuple[Path, ...]
    manifest: Manifest
    route: Literal["full", "delta", "adapter", "cache"] = "full"
    """How the files were made. `full`: from a version stored whole, downloaded. `delta`, `adapter`: from a version that
    was on this machine. `cache`: another searcher of this machine had made them."""
    downloaded_bytes: int = 0
    num_failed_routes: int = 0
    base: LocalVersion | None = None
    """The starting model, if it was downloaded to merge an adapter, and is kept for the next adapter (`keeps_base`)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to make the files of a version: where to start, and the deltas or the adapter to apply."""

    start: LocalVersion | Manifest
    """A version whose files are on this machine, or the manifest of a version that is stored whole."""
    deltas: tuple[Manifest, ...]
    """Versions whose deltas are applied, oldest first; the last one is the wanted version itself."""
    adapter: Adapter | None = None
    """The wanted version's adapter, to be merged into the start in place of deltas."""

    @property
    def size_bytes(self) -> int:
        """Bytes to download."""
        full = 0 if isinstance(self.start, LocalVersion) else sum(each.size_bytes for each in self.start.full)
        merged = 0 if self.adapter is None else self.adapter.stored.size_bytes
        return full + merged + sum(each.delta_bytes for each in self.deltas)


class VersionReader:
    """Downloads versions of one run.

    Args:
        manifest: returns the manifest of a version of the run.
        cache: shared by the searchers of this machine; None: no cache is used.
    """

    def __init__(
        self, store: ObjectStore, manifest: Callable[[PolicyVersion], Manifest], cache: NodeCache | None
    ) -> None:
        self._store, self._manifest, self._cache = store, manifest, cache
        self.num_failed = 0
        """Routes that failed since this object was made, whether or not a later route succeeded."""

    def download(
        self,
        target: Manifest,
        folder: Path,
        *,
        held: Sequence[LocalVersion],
        files: Sequence[StoredObject] = (),
        keeps_base: bool = False,
    ) -> LocalVersion:
        """Write the tensor files of a version, and the other `files`, into `folder`, once all of them are verified.

        Args:
            held: versions whose files are on this machine, which routes may start from; the files are only read.
            keeps_base: keep a downloaded starting model in a subfolder of `folder` (`LocalVersion.base`).

        Raises:
            ObjectNotFoundError, DigestError, MalformedError: every route has failed; this is the first route's error.
            StoreUnavailableError: the store is away, or the local disk is full.
        """
        incoming: Path | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # in the same folder, so that the renames below cannot cross file systems
            incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder))
            for stored in files:
                self._get(stored, incoming / stored.name)
            if self._cache is None:
                local = self._by_any_route(target, incoming, held)
            else:
                local = self._by_cache(self._cache, target, incoming, held)
            for path in (*local.paths, *(incoming / stored.name for stored in files)):
                # only when every file is verified: an engine never sees a mixture of two versions
                os.replace(path, folder / path.name)
            base = local.base if keeps_base else None
            if base is not None:
                place = folder / f"base-{base.version}"
                place.mkdir(exist_ok=True)
                for path in base.paths:
                    os.replace(path, place / path.name)
                base = replace(base, paths=tuple(place / path.name for path in base.paths))
            return replace(local, paths=tuple(folder / path.name for path in local.paths), base=base)
        except TbaError:
            raise
        except OSError as error:
            full = explain_full_disk(error, folder)
            detail = full or f"{error}; this user needs write access to the folder"
            raise StoreUnavailableError(
                f"weight version {target.version} cannot be written to {folder}: {detail}"
            ) from error
        finally:
            if incoming is not None:
                shutil.rmtree(incoming, ignore_errors=True)

    def _routes(self, target: Manifest, held: Sequence[LocalVersion], gaps: list[TbaError]) -> Iterator[Route]:
        """Yield the routes to a version, in the order to try them.

        First come routes through its adapter. Then come routes from versions on this machine, while their deltas are
        smaller than the whole version. Last come routes from versions stored whole, the nearest first.

        Args:
            gaps: gets an error appended for each missing or damaged manifest that ends a search for routes.
        """
        here = {local.version: local for local in held}
        if target.adapter is not None:
            version = PolicyVersion.parse(target.adapter.base)
            if version in here:
                yield Route(here[version], (), target.adapter)
            try:
                base = self._manifest(version)
            except (ObjectNotFoundError, MalformedError) as error:
                gaps.append(error)
            else:
                if base.is_full:
                    yield Route(base, (), target.adapter)
                else:  # a base that must be assembled itself would be a chain without end
                    problem = f"the starting model {version}, which its adapter is for, is not stored whole"
                    gaps.append(MalformedError(problem))
        for node, deltas in self._chain(target, here, []) if here else ():
            delta_bytes = sum(each.delta_bytes for each in deltas)
            if node.policy_version < min(here) or delta_bytes > target.full_bytes or len(deltas) > _MAX_SEARCHED:
                break
            if node.policy_version in here:
                yield Route(here[node.policy_version], deltas)
        for node, deltas in self._chain(target, here, gaps):
            if node.is_full:
                yield Route(node, deltas)

    def _chain(
        self, target: Manifest, here: Mapping[PolicyVersion, LocalVersion], gaps: list[TbaError]
    ) -> Iterator[tuple[Manifest, tuple[Manifest, ...]]]:
        """Yield `target`, its base, the base's base, and so on, each with the deltas that lead from it to `target`."""
        node, deltas = target, ()
        yield node, deltas
        while node.base is not None and len(deltas) < MAX_DELTAS:
            deltas = (node, *deltas)
            try:
                node = here[node.base].manifest if node.base in here else self._manifest(node.base)
            except (ObjectNotFoundError, MalformedError) as error:
                gaps.append(error)  # usual behind a full version, whose bases are deleted in time
                return
            yield node, deltas

    def _by_cache(self, cache: NodeCache, target: Manifest, folder: Path, held: Sequence[LocalVersion]) -> LocalVersion:
        """Take the files from the cache. If one is missing or damaged, make all of them and add them to the cache.

        While another process makes the same files, wait for it (`NodeCache.only_one`).
        """
        names: dict[str, str] = {}
        for file in dict.fromkeys(each.file for each in target.tensors):
            # by its tensors, wherever it was made
            members = [(each.name, each.dtype, each.shape, each.digest) for each in target.tensors if each.file == file]
            names[file] = f"tensors-{table_sha256(members)}"
        paths = tuple(folder / file for file in names)
        # one of the searchers of this machine makes a version, the others wait for it
        with cache.only_one(names[paths[0].name]):
            room = dict.fromkeys(names, _MAX_HEADER_BYTES)
            for each in target.tensors:
                room[each.file] += each.size_bytes
            if all(cache.take(name, folder / file, max_bytes=room[file]) for file, name in names.items()):
                try:
                    check_tensors_of(target, paths)
                    return LocalVersion(target.policy_version, paths, target, "cache")
                except (DigestError, MalformedError):
                    for name in names.values():
                        cache.discard(name)
            for path in paths:
                path.unlink(missing_ok=True)
            local = self._by_any_route(target, folder, held)
            for file, name in names.items():
                cache.add(name, folder / file)
            return local

    def _by_any_route(self, target: Manifest, folder: Path, held: Sequence[LocalVersion]) -> LocalVersion:
        num_failed, first_error = 0, None
        gaps: list[TbaError] = []
        for route in self._routes(target, held, gaps):
            try:
                local = self._take(route, target, folder)
                return replace(local, num_failed_routes=num_failed)
            except StoreUnavailableError:
                raise  # no fault of the route
            except (StoreError, MalformedError, FileNotFoundError) as error:  # files that were here may be gone
                where = "here" if isinstance(route.start, LocalVersion) else "full"
                start = f"{route.start.version} ({where}{'' if route.adapter is None else ', adapter'})"
                log.warning("weights_route_failed", version=target.version, start=start, reason=str(error))
                first_error, num_failed = first_error or error, num_failed + 1
                self.num_failed += 1
        if first_error is not None:
            raise first_error
        kind = MalformedError if gaps and isinstance(gaps[0], MalformedError) else ObjectNotFoundError
        why = f" ({gaps[0]})" if gaps else ""
        if target.delta is None:
            raise kind(
                f"weight version {target.version} of run {target.run} is stored as an adapter, and the starting model "
                f"that it is for cannot be had{why}; start the trainer again: it publishes the starting model"
            )
        raise kind(
            f"weight version {target.version} of run {target.run} is stored as a delta, and no full version is left "
            f"that its chain of deltas starts from{why}; a newer version that is full can be used"
        )

    def _take(self, route: Route, target: Manifest, folder: Path) -> LocalVersion:
        """Write the verified tensors of a version into `folder` by this route. Downloaded files may be left there."""
        if route.adapter is not None:
            return self._merge(route, route.adapter, target, folder)
        if isinstance(route.start, LocalVersion):
            base_paths, kind = list(route.start.paths), "delta"
        else:
            base_paths = [self._get(stored, folder / f".full-{stored.name}") for stored in route.start.full]
            kind = "full"
        if isinstance(route.start, Manifest) and not route.deltas:
            paths = [
                path.rename(path.with_name(stored.name)) for path, stored in zip(base_paths, target.full, strict=True)
            ]
            try:
                check_tensors_of(target, paths)
            except (DigestError, MalformedError) as error:
                keys = ", ".join(stored.key for stored in target.full)
                raise DigestError(f"{keys} in {self._store.url}: {error}; {_REMEDY}") from None
            return LocalVersion(target.policy_version, tuple(paths), target, "full", route.size_bytes)
        steps = [
            (each, [self._get(stored, folder / f".{each.version}-{stored.name}") for stored in each.delta.objects])
            for each in route.deltas
            if each.delta is not None
        ]
        paths = assemble(target, base_paths, steps, folder)
        return LocalVersion(target.policy_version, tuple(paths), target, kind, route.size_bytes)

    def _merge(self, route: Route, adapter: Adapter, target: Manifest, folder: Path) -> LocalVersion:
        """Merge the adapter of a version into the starting model; download the model first if this machine lacks it."""
        path = self._get(adapter.stored, folder / f".{adapter.stored.name}")
        base: LocalVersion | None = None
        if isinstance(route.start, LocalVersion):
            start = route.start
        else:
            place = folder / f".base-{route.start.version}"
            place.mkdir(exist_ok=True)
            if self._cache is None:
                start = base = self._take(Route(route.start, ()), route.start, place)
            else:  # other searchers of this machine have merged from it
                start = base = self._by_cache(self._cache, route.start, place, ())
        paths = merge(target, open_tensors(start.paths), adapter, path, folder)
        kind = "adapter" if base is None or base.route == "cache" else "full"
        downloaded_bytes = adapter.stored.size_bytes + (0 if base is None else base.downloaded_bytes)
        return LocalVersion(target.policy_version, tuple(paths), target, kind, downloaded_bytes, base=base)

    def _get(self, stored: StoredObject | TensorFile | DeltaObject, path: Path) -> Path:
        """Download an object; check its size, and its digest where it has one.

        Raises:
            ObjectNotFoundError
            DigestError: the object's bytes are not what the manifest says.
        """
        size_bytes = self._store.size_bytes(stored.key)
        if size_bytes not in (None, stored.size_bytes):  # check first: it may be larger than the disk
            raise damage_error(self._store, stored, f"{size_bytes} bytes")
        self._store.get_file(stored.key, path, max_bytes=stored.size_bytes)
        match stored:
            case TensorFile():  # the digests of its tensors prove it: it is not read twice
                expected = found = ""
            case DeltaObject():
                expected, found = stored.digest, digest_of_file(path)
            case StoredObject():
                expected, found = stored.sha256, sha256_of_file(path)
        if path.stat().st_size != stored.size_bytes or found != expected:
            raise damage_error(self._store, stored, f"{path.stat().st_size} bytes with digest {found}, not {expected}")
        return path


def damage_error(store: ObjectStore, stored: StoredObject | TensorFile | DeltaObject, found: str) -> DigestError:
    """Return the error about an object whose bytes are not what the manifest says; `found` says what they are."""
    return DigestError(
        f"object {stored.key} in {store.url} is damaged: {found}, the manifest says {stored.size_bytes} bytes; "
        f"{_REMEDY}"
    )


def assemble(
    manifest: Manifest, base_paths: Sequence[Path], steps: Sequence[tuple[Manifest, Sequence[Path]]], folder: Path
) -> list[Path]:
    """Apply deltas to a base version, and write the files of the newest version to `folder`. Check every tensor.

    Args:
        manifest: of the newest version.
        base_paths: the files of the base.
        steps: manifest and delta files of each version after the base, oldest first; the last manifest is `manifest`.

    Returns:
        The paths of the files written: one for each different `file` of the manifest's tensors.

    Raises:
        DigestError: a tensor is not what the manifest says.
        MalformedError: a delta cannot have been written for this base.
        StoreError: a file cannot be read.
        StoreUnavailableError: the local disk is full.
    """
    tables = [{entry.name: entry for entry in version.tensors} for version, _ in steps]
    base = open_tensors(base_paths)
    changes: list[Mapping[str, RawTensor]] = []
    for (version, paths), table in zip(steps, tables, strict=True):
        changes.append(open_tensors(paths))
        if unknown := sorted(changes[-1].keys() - table.keys()):
            raise MalformedError(f"the delta of version {version.version} changes {unknown[0]!r}, no tensor of it")
    plans = {entry.name: _plan(entry, base.get(entry.name), tables, changes) for entry in manifest.tensors}
    for entry in manifest.tensors:  # before room is made: the sizes are a stranger's
        if plans[entry.name][0] is None and not plans[entry.name][1]:
            raise MalformedError(f"the base of version {manifest.version} lacks the tensor {entry.name!r}")

    def build(entry: TensorEntry, out: NDArray[np.uint8]) -> None:
        current, encoded = plans[entry.name]
        for each in encoded:
            apply_tensor(each, current, out, entry.dtype)
            current = out
        if current is not None and current is not out:
            np.copyto(out, current)

    return _write_files(manifest, folder, build)


def merge(manifest: Manifest, base: Mapping[str, RawTensor], adapter: Adapter, path: Path, folder: Path) -> list[Path]:
    """Merge an adapter into the starting model, and write the files of the version to `folder`. Check every tensor.

    Args:
        manifest: of the version.
        base: tensors of the starting model.
        path: file of the adapter.

    Returns, Raises: as `assemble`.
    """
    layers = read_adapter(adapter, path, base)
    for entry in manifest.tensors:  # before room is made: the sizes are a stranger's
        if entry.name not in base or (entry.dtype, tuple(entry.shape)) != base[entry.name][:2]:
            raise MalformedError(
                f"tensor {entry.name!r} of version {manifest.version} is {entry.dtype} {entry.shape}, and the starting "
                f"model, which its adapter is for, has {list(base[entry.name][:2]) if entry.name in base else 'none'}"
            )

    def build(entry: TensorEntry, out: NDArray[np.uint8]) -> None:
        if entry.name in layers:
            merge_into(base[entry.name], layers[entry.name], out)
        else:
            np.copyto(out, base[entry.name][2])

    return _write_files(manifest, folder, build)


def _plan(
    wanted: TensorEntry,
    before: RawTensor | None,
    tables: Sequence[Mapping[str, TensorEntry]],
    changes: Sequence[Mapping[str, RawTensor]],
) -> tuple[NDArray[np.uint8] | None, list[memoryview]]:
    """Return the bytes that a tensor starts from (None: the first change holds it whole), and the changes to apply.

    `tables`, `changes`: manifest entries and encoded tensors of each delta, oldest first, as is the returned list.
    """
    current = None if before is None or before[2].nbytes != wanted.size_bytes else before[2]
    encoded: list[memoryview] = []
    for table, changed in zip(tables, changes, strict=True):
        entry = table.get(wanted.name)
        if entry is None or entry.size_bytes != wanted.size_bytes:
            # it vanished or had another shape meanwhile: it is whole when it comes back
            current, encoded = None, []
        elif wanted.name in changed:
            encoded.append(changed[wanted.name][2].data)
            # a byte for each segment, at least
            if encoded[-1].nbytes * SEGMENT_ELEMENTS * DTYPE_BYTES[wanted.dtype] < wanted.size_bytes:
                raise MalformedError(
                    f"a delta of {encoded[-1].nbytes} bytes cannot hold tensor {wanted.name!r} of {wanted.size_bytes}"
                )
    return current, encoded


def _write_files(
    manifest: Manifest, folder: Path, build: Callable[[TensorEntry, NDArray[np.uint8]], None]
) -> list[Path]:
    """Write the safetensors files of a version and return their paths. `build` fills the bytes of each tensor, in
    several threads; then its digest is checked.

    Format: 8 bytes little-endian header length, JSON header, data (huggingface.co/docs/safetensors).
    """
    views: dict[str, NDArray[np.uint8]] = {}
    names = list(dict.fromkeys(entry.file for entry in manifest.tensors))
    for name in names:
        # wide dtypes first, as the library writes them: then each tensor is aligned
        members = sorted(
            (entry for entry in manifest.tensors if entry.file == name),
            key=lambda entry: (-DTYPE_BYTES[entry.dtype], entry.name),
        )
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        places: dict[str, tuple[int, int]] = {}
        for entry in members:
            begin, end = end, end + entry.size_bytes
            places[entry.name] = (begin, end)
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        start = 8 + len(encoded)
        try:
            with (folder / name).open("w+b") as file:
                # reserved first: a write into a map that the disk has no room for kills the process
                if start + end > shutil.disk_usage(folder).free:  # some file systems reserve by writing, for hours
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(file.fileno(), 0, start + end)
                file.write(len(encoded).to_bytes(8, "little") + encoded)
                file.flush()
                data = np.frombuffer(mmap.mmap(file.fileno(), start + end), np.uint8)
        except OSError as error:
            full = explain_full_disk(error, folder, size_bytes=start + end)
            raise StoreUnavailableError(full or f"file {folder / name} cannot be written: {error}") from error
        views |= {key: data[start + begin : start + stop] for key, (begin, stop) in places.items()}

    def build_and_check(entry: TensorEntry) -> None:
        out = views[entry.name]
        build(entry, out)
        if (found := tensor_digest(out)) != entry.digest:
            raise DigestError(
                f"tensor {entry.name!r} of weight version {manifest.version} has the digest {found}, the manifest says "
                f"{entry.digest}"
            )

    in_parallel(build_and_check, manifest.tensors, size_bytes=sum(out.nbytes for out in views.values()))
    return [folder / name for name in names]
