"""Write a version to the store: describe its tensors (those of an adapter are merged for that), encode a delta where it
pays, upload, manifest last. Several processes may each store a share of it (shares.py); one writes the manifest."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from pydantic import ValidationError

from tba.errors import MalformedError, ObjectExistsError, ObjectNotFoundError, StoreUnavailableError
from tba.fields import first_problem
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights.adapter import AdapterFile, merged_table
from tba.weights.assembly import check_tensors_of
from tba.weights.digest import open_tensors, sha256_of_file
from tba.weights.routes import LocalVersion
from tba.weights.shares import CheckedFiles, OtherShares, Share, ShareBase, ShareTable, describe_changes, put_file
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


def version_prefix(run: str, version: PolicyVersion) -> str:
    """Return what the keys of a version begin with."""
    return f"runs/{run}/weights/{version}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """When versions are stored as deltas."""

    keyframe_interval: int = 16
    """Every so many versions one is stored whole."""
    max_share: float = 0.5
    """A delta pays when it has at most this share of the bytes of the tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The tensors of a version, how they are stored, and what uploads them."""

    tensors: list[TensorEntry]
    full: list[TensorFile] = field(default_factory=list)
    delta: Delta | None = None
    adapter: Adapter | None = None
    upload: Callable[[], None]


class NewVersion(TypedDict):
    """What `WeightVersions.publish` is told of a version."""

    version: PolicyVersion
    parent: PolicyVersion | None
    dtype: str
    """float32, bfloat16 or float16; what the tensors are stored as."""
    tensors_paths: Sequence[Path] | AdapterFile
    """safetensors files with `model.named_parameters()`, stored under their names; or an adapter, and `base` is the
    starting model."""
    files: Mapping[str, Path]
    """File name -> path; `config.json` and the tokenizer's files."""
    canary: Canary
    torch_version: str
    transformers_version: str
    base: NotRequired[LocalVersion | None]
    """An older version whose files are here, for a delta; None: the version is stored whole."""
    deltas: NotRequired[DeltaSettings | None]
    """When a version is stored as a delta; None: the defaults."""
    others: NotRequired[OtherShares | None]
    """What stores the tensors that are not in `tensors_paths`; None: all are."""


class VersionWriter:
    """Writes versions of one run.

    Args:
        manifest: returns the manifest of a version of the run.
    """

    def __init__(self, store: ObjectStore, run: str, manifest: Callable[[PolicyVersion], Manifest]) -> None:
        self._store, self._run, self._manifest = store, run, manifest
        self._checked = CheckedFiles()

    def publish(self, new: NewVersion) -> Manifest:
        """Make a version exist (see `WeightVersions.publish`)."""
        version, files = new["version"], new["files"]
        if MODEL_CONFIG_NAME not in files:
            raise MalformedError(f"weight version {version}: files hold no {MODEL_CONFIG_NAME}; got {sorted(files)}")
        # asked first: while the store is away, the tensors are not hashed and encoded
        exists = self._store.size_bytes(f"{version_prefix(self._run, version)}manifest.json") is not None
        tensors_paths = new["tensors_paths"]
        paths = (tensors_paths.path,) if isinstance(tensors_paths, AdapterFile) else tensors_paths
        # encoded files are beside the tensors, where there is room
        with tempfile.TemporaryDirectory(prefix=".delta-", dir=paths[0].parent, ignore_cleanup_errors=True) as folder:
            manifest, stored = self._describe(new, Path(folder))
            return self._upload(manifest, stored, files, exists=exists)

    def _describe(self, new: NewVersion, folder: Path) -> tuple[Manifest, _Stored]:
        """Describe a version, and encode it in a folder where that pays."""
        version, files, tensors_paths = new["version"], new["files"], new["tensors_paths"]
        base, parent = new.get("base"), new["parent"]
        prefix = version_prefix(self._run, version)
        if isinstance(tensors_paths, AdapterFile):
            stored = self._describe_adapter(version, prefix, base, tensors_paths)
        else:
            share = Share(self._store, prefix, tensors_paths, folder, checked=self._checked)
            settings = new.get("deltas") or DeltaSettings()
            stored = self._describe_tensors(share, prefix, base, tensors_paths, settings, new.get("others"))
        stored_files = []
        for name, path in sorted(files.items()):
            sha256 = sha256_of_file(path)
            key = f"runs/{self._run}/files/{sha256}/{name}"
            stored_files.append(StoredObject(name=name, key=key, size_bytes=path.stat().st_size, sha256=sha256))
        # `name sha256` lines of every file except the configs of model and generation
        tokenizer_lines = [f"{each.name} {each.sha256}\n" for each in stored_files if each.name not in NOT_TOKENIZER]
        try:
            manifest = Manifest(
                run=self._run,
                version=str(version),
                parent=None if parent is None else str(parent),
                dtype=new["dtype"],  # pyright: ignore[reportArgumentType]  # the model checks it
                tensors=stored.tensors,
                full=stored.full,
                delta=stored.delta,
                adapter=stored.adapter,
                files=stored_files,
                model_config_sha256=next(f.sha256 for f in stored_files if f.name == MODEL_CONFIG_NAME),
                tokenizer_sha256=sha256_hex("".join(tokenizer_lines).encode()),
                params_sha256=table_sha256((t.name, t.dtype, t.shape, t.digest) for t in stored.tensors),
                canary=new["canary"],
                torch_version=new["torch_version"],
                transformers_version=new["transformers_version"],
                created_at_s=time.time(),
            )
        except ValidationError as error:
            raise MalformedError(f"weight version {version}: {first_problem(error)}") from None
        return manifest, stored

    def _upload(self, manifest: Manifest, stored: _Stored, files: Mapping[str, Path], *, exists: bool) -> Manifest:
        """Write objects, then the manifest; return the manifest that is in the store."""
        data = encode_manifest(manifest)  # before an upload: it may be too large
        # to compare the manifests is cheap, and uploading the same tensors a second time is not
        if exists and (found := self._existing(manifest)) is not None:
            return found
        for each in manifest.files:
            put_file(self._store, each.key, each.size_bytes, files[each.name])
        stored.upload()
        try:
            # two trainers may publish the same version at once: create-only decides which of them made it
            key = f"{version_prefix(self._run, manifest.policy_version)}manifest.json"
            self._store.put(key, data, create_only=True)
        except ObjectExistsError:
            if (found := self._existing(manifest)) is not None:
                return found
            raise
        return manifest

    def _describe_tensors(
        self,
        share: Share,
        prefix: str,
        base: LocalVersion | None,
        paths: Sequence[Path],
        settings: DeltaSettings,
        others: OtherShares | None,
    ) -> _Stored:
        """Describe a version that is stored whole, as a delta against `base`, or as both, by all processes at once."""
        total_bytes = sum(path.stat().st_size for path in paths) + (0 if others is None else others.size_bytes)
        num_to_full = self._num_to_full(base)
        max_bytes = settings.max_share * total_bytes
        against = None
        if base is not None and num_to_full is not None:
            against = ShareBase(base.paths, {each.name: each.digest for each in base.manifest.tensors})
        if others is not None:
            others.begin_describe(None if against is None else against.digests, max_bytes=max_bytes)
        tables: list[ShareTable] = []
        try:
            tables.append(share.describe(against, max_bytes=max_bytes))
        finally:  # whatever happens here: none may be busy with the version when it is tried again
            if others is not None:
                tables += others.wait_described()
        tensors = [each for table in tables for each in table.tensors]
        delta = None
        if base is not None and num_to_full is not None:
            delta = _delta(base, num_to_full, tables, max_bytes)
        is_full = delta is None or delta.num_to_full >= settings.keyframe_interval
        full = [each for table in tables for each in table.full] if is_full else []
        theirs = [each for table in tables[1:] for each in (table.full if is_full else [])]
        theirs += [] if delta is None else [each for table in tables[1:] for each in table.changes or ()]

        def upload() -> None:
            if others is not None:
                others.begin_upload(whole=is_full, changes=delta is not None)
            try:
                share.upload(whole=is_full, changes=delta is not None)
            finally:
                if others is not None:
                    others.wait_uploaded()
            self._check_stored(theirs)

        return _Stored(tensors=tensors, full=full, delta=delta, upload=upload)

    def _num_to_full(self, base: LocalVersion | None) -> int | None:
        """Return the deltas from the nearest full version if this one is a delta against `base`; None: it is none."""
        if base is None or base.manifest.run != self._run:  # its version is of another run
            return None
        before = base.manifest
        num_to_full = 1 if before.is_full or before.delta is None else before.delta.num_to_full + 1
        return None if num_to_full > MAX_DELTAS else num_to_full

    def _check_stored(self, objects: Sequence[TensorFile | DeltaObject]) -> None:
        """Check that what other processes have stored is in the store of this one."""
        for each in objects:
            if self._store.size_bytes(each.key) != each.size_bytes:
                raise StoreUnavailableError(
                    f"another process of this trainer has stored {each.key}, and it is not in {self._store.url}; all "
                    "processes need the same store: a folder must be shared by their machines (store.url)"
                )

    def _describe_adapter(
        self, version: PolicyVersion, prefix: str, base: LocalVersion | None, file: AdapterFile
    ) -> _Stored:
        """Describe a version that is an adapter for `base`, the starting model."""
        if base is None:
            raise MalformedError(
                f"weight version {version} is an adapter, and the tensors of the starting model that it is for are not "
                "known"
            )
        # else nobody could merge the adapter to what is merged here
        digests = {each.name: each.digest for each in base.manifest.tensors}
        self._checked.ensure(digests, base.paths, lambda: check_tensors_of(base.manifest, base.paths))
        stored = describe_changes(prefix, file.path, stem="adapter")
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
        return _Stored(
            tensors=tensors,
            adapter=adapter,
            upload=lambda: put_file(self._store, stored.key, stored.size_bytes, file.path),
        )

    def _existing(self, manifest: Manifest) -> Manifest | None:
        """Return the manifest of this version that is in the store, if its content is the same; None: there is none.

        Raises:
            ObjectExistsError: the version exists with other content.
        """
        try:
            found = self._manifest(manifest.policy_version)
        except ObjectNotFoundError:
            return None
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


def _delta(base: LocalVersion, num_to_full: int, tables: Sequence[ShareTable], max_bytes: float) -> Delta | None:
    """Return the delta of all shares; None where a process could not encode its own, or it does not pay."""
    objects: list[DeltaObject] = []
    for table in tables:
        if table.changes is None:
            return None
        objects += table.changes
    if len(tables) > 1 and sum(each.size_bytes for each in objects) > max_bytes:
        return None
    return Delta(base=str(base.version), num_to_full=num_to_full, objects=objects)
