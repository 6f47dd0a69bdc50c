"""Get the files of a version out of the store, by the cheapest route in bytes.

    route   a full version in the store, or a version whose files are here, and the deltas from it to the version; or
            the starting model, in the store or here, and the adapter of the version

Every resulting tensor is verified. When a route fails (damage, a gap, a delta for another base), the next one is tried;
routes from full versions come last, so a wrong file on this machine never blocks a version.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, StoreError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.store.file import explain_full_disk
from tba.versions import PolicyVersion
from tba.weights.assembly import assemble, check_tensors_of, merge
from tba.weights.digest import digest_of_file, open_tensors, sha256_of_file
from tba.weights.node_cache import NodeCache
from tba.wire.weight_manifest import MAX_DELTAS, Adapter, DeltaObject, Manifest, StoredObject, TensorFile, table_sha256

_MAX_SEARCHED = 32
"""Deltas within which a version that is here is looked for: each manifest is a request."""
_MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the library reads no longer one."""
_REMEDY = "pull again; if the error remains, delete the version"
log = get_logger("weights")


@dataclass(frozen=True, slots=True)
class LocalVersion:
    """One version whose tensors are in local files, every digest verified."""

    version: PolicyVersion
    paths: tuple[Path, ...]
    manifest: Manifest
    route: Literal["full", "delta", "adapter", "cache"] = "full"
    """How the files were made: `delta` and `adapter` when a version that was here was the start; `cache` when another
    searcher of this machine had made them."""
    downloaded_bytes: int = 0
    num_failed_routes: int = 0
    base: LocalVersion | None = None
    """The starting model that was downloaded to merge an adapter into it, where the caller keeps it."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way to the files of a version."""

    start: LocalVersion | Manifest
    """Files that are here, or a version that is stored whole."""
    deltas: tuple[Manifest, ...]
    """Versions whose deltas are applied, oldest first; the last one is the version itself."""
    adapter: Adapter | None = None
    """Of the version; it is merged into the start, in place of deltas."""

    @property
    def size_bytes(self) -> int:
        """Bytes to download."""
        full = 0 if isinstance(self.start, LocalVersion) else sum(each.size_bytes for each in self.start.full)
        merged = 0 if self.adapter is None else self.adapter.stored.size_bytes
        return full + merged + sum(each.delta_bytes for each in self.deltas)


class RouteReader:
    """Downloads versions of one run.

    Args:
        manifest: returns the manifest of a version of the run.
        cache: of this machine; None: there is none.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: Callable[[PolicyVersion], Manifest],
        cache: NodeCache | None,
    ) -> None:
        self._store, self._manifest, self._cache = store, manifest, cache
        self.num_failed = 0
        """Routes that failed since the start, those of downloads for which none was left too."""

    def download(
        self,
        target: Manifest,
        folder: Path,
        *,
        held: Sequence[LocalVersion],
        files: Sequence[StoredObject] = (),
        keeps_base: bool = False,
    ) -> LocalVersion:
        """Write the tensors of a version, and some of its other files, into `folder`, all or none, each verified.

        Args:
            held: versions whose files are on this machine; they stay as they are.
            keeps_base: a starting model that had to be downloaded goes into a folder in `folder` (`LocalVersion.base`).

        Raises:
            ObjectNotFoundError, DigestError, MalformedError: why the cheapest route failed, when all have.
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
            base = _moved(local.base, folder) if keeps_base and local.base is not None else None
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
        """Yield the routes to a version: first from what is here, as long as its deltas are smaller than the whole
        version, then from versions that are stored whole, the nearest first.

        Args:
            gaps: gets the reason why the chain of bases ends before its first version, if it does.
        """
        here = {local.version: local for local in held}
        yield from self._adapter_routes(target, here, gaps)
        for node, deltas in self._chain(target, here, []) if here else ():
            delta_bytes = sum(each.delta_bytes for each in deltas)
            if node.policy_version < min(here) or delta_bytes > target.full_bytes or len(deltas) > _MAX_SEARCHED:
                break
            if node.policy_version in here:
                yield Route(here[node.policy_version], deltas)
        for node, deltas in self._chain(target, here, gaps):
            if node.is_full:
                yield Route(node, deltas)

    def _adapter_routes(
        self, target: Manifest, here: Mapping[PolicyVersion, LocalVersion], gaps: list[TbaError]
    ) -> Iterator[Route]:
        """Yield the ways through the adapter of a version: to the starting model that is here, and from the store's."""
        if target.adapter is None:
            return
        version = PolicyVersion.parse(target.adapter.base)
        if version in here:
            yield Route(here[version], (), target.adapter)
        try:
            base = self._manifest(version)
        except (ObjectNotFoundError, MalformedError) as error:
            gaps.append(error)
            return
        if base.is_full:
            yield Route(base, (), target.adapter)
        else:  # a base that must be assembled itself would be a chain without end
            gaps.append(MalformedError(f"the starting model {version}, which its adapter is for, is not stored whole"))

    def _chain(
        self, target: Manifest, here: Mapping[PolicyVersion, LocalVersion], gaps: list[TbaError]
    ) -> Iterator[tuple[Manifest, tuple[Manifest, ...]]]:
        """Yield the version and its bases, each with the deltas from it to the version."""
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
        """Take the files from the cache; where it lacks one, make them all, and add them."""
        names = {file: _content_name(target, file) for file in dict.fromkeys(each.file for each in target.tensors)}
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
                log.warning("weights_route_failed", version=target.version, start=_name(route), reason=str(error))
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
        """Bring the tensors of a version into `folder` by this route alone, verified; other files may be left there."""
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
        """Merge the adapter of a version into the starting model, which is brought here first where it is not."""
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
            DigestError: naming the object whose bytes are not what the manifest says.
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
    """Return the error about an object whose bytes are not what the manifest says."""
    return DigestError(
        f"object {stored.key} in {store.url} is damaged: {found}, the manifest says {stored.size_bytes} bytes; "
        f"{_REMEDY}"
    )


def _moved(base: LocalVersion, folder: Path) -> LocalVersion:
    """Move the files of a starting model into a folder of its own in `folder`."""
    target = folder / f"base-{base.version}"
    target.mkdir(exist_ok=True)
    for path in base.paths:
        os.replace(path, target / path.name)
    return replace(base, paths=tuple(target / path.name for path in base.paths))


def _content_name(manifest: Manifest, file: str) -> str:
    """Return a name of a safetensors file by its tensors, wherever it was made."""
    members = [(each.name, each.dtype, each.shape, each.digest) for each in manifest.tensors if each.file == file]
    return f"tensors-{table_sha256(members)}"


def _name(route: Route) -> str:
    where = "here" if isinstance(route.start, LocalVersion) else "full"
    adapter = "" if route.adapter is None else ", adapter"
    return f"{route.start.version} ({where}{adapter})"
