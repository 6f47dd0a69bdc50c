"""Write a version to the store: describe its tensors (those of an adapter are merged for that), encode a delta where it
pays, upload, manifest last."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from tba.errors import DigestError, MalformedError, ObjectExistsError, ObjectNotFoundError, StoreError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights.adapter import AdapterFile, merged_table
from tba.weights.assembly import check_tensors_of, encode_changes
from tba.weights.digest import (
    describe_tensors,
    digest_of_file,
    legacy_params_sha256,
    open_tensors,
    sha256_of_file,
)
from tba.weights.routes import LocalVersion
from tba.wire.weight_manifest import (
    MAX_DELTAS,
    Adapter,
    Canary,
    Delta,
    DeltaObject,
    Manifest,
    StoredObject,
    TensorEntry,
    TensorFile,
    encode_manifest,
    sha256_hex,
    table_sha256,
)

MODEL_CONFIG_NAME = "config.json"
NOT_TOKENIZER = (MODEL_CONFIG_NAME, "generation_config.json")
_NOT_CONTENT = {"schema_version", "created_at_s", "canary", "torch_version", "transformers_version"}
_REPRESENTATION = {"tensors", "full", "delta", "adapter"}
"""How a version is stored; `params_sha256` says which tensors it has."""
log = get_logger("weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """When versions are stored as deltas."""

    keyframe_interval: int = 16
    """Every so many versions one is stored whole; 1: all are."""
    min_bytes: int = 8 * 1024 * 1024
    """Smaller models are stored whole: their requests cost more than their bytes."""
    max_share: float = 0.5
    """A delta pays when it has at most this share of the bytes of the tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The tensors of a version, and how they are stored: what is uploaded, with the file of each object."""

    tensors: list[TensorEntry]
    full: list[tuple[TensorFile, Path]] = field(default_factory=list)
    delta: Delta | None = None
    adapter: Adapter | None = None
    changes: list[tuple[DeltaObject, Path]] = field(default_factory=list)


class VersionWriter:
    """Writes versions of one run.

    Args:
        manifest: returns the manifest of a version of the run.
    """

    def __init__(self, store: ObjectStore, run: str, manifest: Callable[[PolicyVersion], Manifest]) -> None:
        self._store, self._run, self._manifest = store, run, manifest

    def publish(
        self,
        *,
        version: PolicyVersion,
        parent: PolicyVersion | None,
        dtype: str,
        tensors_paths: Sequence[Path] | AdapterFile,
        files: Mapping[str, Path],
        canary: Canary,
        torch_version: str,
        transformers_version: str,
        base: LocalVersion | None,
        deltas: DeltaSettings,
    ) -> Manifest:
        """Make a version exist (see `WeightVersions.publish`)."""
        if MODEL_CONFIG_NAME not in files:
            raise MalformedError(f"weight version {version}: files hold no {MODEL_CONFIG_NAME}; got {sorted(files)}")
        prefix = f"runs/{self._run}/weights/{version}/"
        # asked first: while the store is away, the tensors are not hashed and encoded at each attempt
        exists = self._store.size_bytes(f"{prefix}manifest.json") is not None
        beside = tensors_paths.path if isinstance(tensors_paths, AdapterFile) else tensors_paths[0]
        with tempfile.TemporaryDirectory(prefix=".delta-", dir=beside.parent) as folder:
            try:
                if isinstance(tensors_paths, AdapterFile):
                    stored = self._describe_adapter(version, prefix, base, tensors_paths)
                else:
                    stored = self._describe_tensors(prefix, base, tensors_paths, Path(folder), deltas)
                stored_files = [self._describe_file(name, files[name]) for name in sorted(files)]
                manifest = Manifest(
                    run=self._run,
                    version=str(version),
                    parent=None if parent is None else str(parent),
                    dtype=dtype,  # pyright: ignore[reportArgumentType]  # the model checks it
                    tensors=stored.tensors,
                    full=[each for each, _ in stored.full],
                    delta=stored.delta,
                    adapter=stored.adapter,
                    files=stored_files,
                    model_config_sha256=next(f.sha256 for f in stored_files if f.name == MODEL_CONFIG_NAME),
                    tokenizer_sha256=_tokenizer_sha256(stored_files),
                    params_sha256=table_sha256((t.name, t.dtype, t.shape, t.digest) for t in stored.tensors),
                    canary=canary,
                    torch_version=torch_version,
                    transformers_version=transformers_version,
                    created_at_s=time.time(),
                )
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise MalformedError(
                    f"weight version {version}: {where} has the value {first['input']!r}: {first['msg']}"
                ) from None
            data = encode_manifest(manifest)  # before an upload: it may be too large
            # to compare the manifests is cheap, and uploading the same tensors a second time is not
            if exists and (found := self._existing(manifest, tensors_paths)) is not None:
                return found
            for each in stored_files:
                self._put_file(each.key, each.size_bytes, files[each.name])
            for each, path in stored.changes:
                self._put_file(each.key, each.size_bytes, path)
            for each, path in stored.full:
                self._put_full(manifest, each, path)
            try:
                # two trainers may publish the same version at once: create-only decides which of them made it
                self._store.put(f"{prefix}manifest.json", data, create_only=True)
            except ObjectExistsError:
                if (found := self._existing(manifest, tensors_paths)) is not None:
                    return found
                raise
            return manifest

    def _describe_tensors(
        self,
        prefix: str,
        base: LocalVersion | None,
        tensors_paths: Sequence[Path],
        folder: Path,
        settings: DeltaSettings,
    ) -> _Stored:
        """Describe a version that is stored whole, as a delta against `base` (encoded in `folder`), or as both."""
        tensors = describe_tensors(tensors_paths)
        delta, paths = self._encode(prefix, base, tensors_paths, folder, settings)
        is_full = delta is None or delta.num_to_full >= settings.keyframe_interval
        full = [(_describe_full(prefix, path), path) for path in tensors_paths] if is_full else []
        changes = list(zip(() if delta is None else delta.objects, paths, strict=True))
        return _Stored(tensors=tensors, full=full, delta=delta, changes=changes)

    def _describe_adapter(
        self, version: PolicyVersion, prefix: str, base: LocalVersion | None, file: AdapterFile
    ) -> _Stored:
        """Describe a version that is an adapter for `base`, the starting model."""
        if base is None or not base.manifest.tensors:
            raise MalformedError(
                f"weight version {version} is an adapter, and the tensors of the starting model that it is for are not "
                "known"
            )
        # else nobody could merge the adapter to what is merged here
        check_tensors_of(base.manifest, base.paths)
        stored = _describe_changes(prefix, file.path, stem="adapter")
        adapter = Adapter(
            base=str(base.version),
            rank=file.rank,
            alpha=file.alpha,
            fan_in_fan_out=file.fan_in_fan_out,
            stored=stored,
        )
        started = time.monotonic()
        tensors = merged_table(base.manifest, open_tensors(base.paths), adapter, file.path)
        log.info("adapter_merged", version=str(version), merge_s=round(time.monotonic() - started, 3))
        return _Stored(tensors=tensors, adapter=adapter, changes=[(stored, file.path)])

    def _encode(
        self,
        prefix: str,
        base: LocalVersion | None,
        tensors_paths: Sequence[Path],
        folder: Path,
        settings: DeltaSettings,
    ) -> tuple[Delta | None, list[Path]]:
        """Encode the changes since `base` in `folder`; None where there is no base, or a delta does not pay."""
        full_bytes = sum(path.stat().st_size for path in tensors_paths)
        if base is None or settings.keyframe_interval == 1 or full_bytes < settings.min_bytes:
            return None, []
        before = base.manifest
        if before.run != self._run:  # its version is of another run
            return None, []
        num_to_full = 1 if before.is_full or before.delta is None else before.delta.num_to_full + 1
        if num_to_full > MAX_DELTAS:
            return None, []
        started = time.monotonic()
        try:
            # a delta against files that are not the base that others have would be of no use to anyone
            if before.tensors:  # not known of a version that a release before deltas has published
                check_tensors_of(before, base.paths)
            paths = encode_changes(base.paths, tensors_paths, folder, max_bytes=settings.max_share * full_bytes)
        except (StoreError, MalformedError) as error:  # the version is stored whole, which needs none of it
            log.warning("delta_not_made", base=before.version, reason=str(error))
            return None, []
        pays = paths is not None
        log.info("delta_encoded", base=before.version, pays=pays, encode_s=round(time.monotonic() - started, 3))
        if paths is None:
            return None, []
        objects = [_describe_changes(prefix, path, stem=path.stem) for path in paths]
        return Delta(base=str(base.version), num_to_full=num_to_full, objects=objects), paths

    def _describe_file(self, name: str, path: Path) -> StoredObject:
        sha256 = sha256_of_file(path)
        key = f"runs/{self._run}/files/{sha256}/{name}"
        return StoredObject(name=name, key=key, size_bytes=path.stat().st_size, sha256=sha256)

    def _put_file(self, key: str, size_bytes: int, path: Path) -> None:
        if self._store.size_bytes(key) != size_bytes:  # else it is there: the key names the content
            self._store.put_file(key, path)

    def _put_full(self, manifest: Manifest, stored: TensorFile, path: Path) -> None:
        try:
            self._store.put_file(stored.key, path, create_only=True)
        except ObjectExistsError:
            # a trainer killed after the upload leaves the same tensors, and they may be published; others never
            members = [entry for entry in manifest.tensors if entry.file == stored.name]
            with tempfile.TemporaryDirectory(prefix="tba-compare-") as folder:
                found = Path(folder) / stored.name
                self._store.get_file(stored.key, found)
                try:
                    check_tensors_of(manifest.model_copy(update={"tensors": members}), [found])
                    is_same = found.stat().st_size == stored.size_bytes
                except (DigestError, MalformedError):
                    is_same = False
            if not is_same:
                raise ObjectExistsError(
                    f"weight version {manifest.version} of run {self._run}: {stored.key} in {self._store.url} holds "
                    "other tensors; another trainer published it, or was killed while it did: take a new lineage, or "
                    "delete the object"
                ) from None

    def _existing(self, manifest: Manifest, tensors_paths: Sequence[Path] | AdapterFile) -> Manifest | None:
        """Return the manifest of this version that is in the store, if its content is the same; None: there is none.

        Raises:
            ObjectExistsError: the version exists with other content.
        """
        try:
            found = self._manifest(manifest.policy_version)
        except ObjectNotFoundError:
            return None
        if found.schema_version == 1 and not isinstance(tensors_paths, AdapterFile):
            legacy = legacy_params_sha256(open_tensors(tensors_paths))
            manifest = manifest.model_copy(update={"params_sha256": legacy})
        skipped = _NOT_CONTENT | _REPRESENTATION
        different = [
            name
            for name in Manifest.model_fields
            if name not in skipped and getattr(found, name) != getattr(manifest, name)
        ]
        if different:
            raise ObjectExistsError(
                f"weight version {manifest.version} of run {self._run} exists with other content "
                f"({', '.join(different)} differ); versions are immutable: take a new lineage"
            )
        return found


def _describe_changes(prefix: str, path: Path, *, stem: str) -> DeltaObject:
    # named by its content: what a killed trainer left under the version never stands in the way
    digest = digest_of_file(path)
    name = f"{stem}-{digest}{path.suffix}"
    return DeltaObject(name=name, key=prefix + name, size_bytes=path.stat().st_size, digest=digest)


def _describe_full(prefix: str, path: Path) -> TensorFile:
    return TensorFile(name=path.name, key=prefix + path.name, size_bytes=path.stat().st_size)


def _tokenizer_sha256(files: Sequence[StoredObject]) -> str:
    """Return the sha256 over `name sha256` lines of every file except the configs of model and generation."""
    lines = [f"{file.name} {file.sha256}\n" for file in files if file.name not in NOT_TOKENIZER]
    return sha256_hex("".join(lines).encode())
