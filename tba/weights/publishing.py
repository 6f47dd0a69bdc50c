"""Store a version: its tensors (whole or as a delta), its other files, and the manifest last.

    WeightVersions.publish -> VersionWriter -> Share.describe   hash the tensors, encode their changes since the base
                                            -> Share.upload     upload the tensors whole, the encoded changes, or both
                                            -> manifest

With several processes, each stores its share: the tensors that it owns. A share needs only local files, so the
processes work independently. One process then writes the manifest, which makes the shares one version. A version that
is stored as an adapter is merged into the starting model in memory, for the digests of its tensors.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tba.errors import (
    DigestError,
    MalformedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from tba.fields import first_problem
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.store.file import explain_no_space
from tba.versions import PolicyVersion
from tba.weights.adapter import AdapterFile, merged_table
from tba.weights.delta import encode_tensor
from tba.weights.digest import (
    FileStamps,
    RawTensor,
    bytes_of,
    check_digests,
    check_tensors_of,
    describe_tensors,
    digest_of_file,
    file_stamps,
    in_parallel,
    num_threads,
    open_tensors,
    sha256_of_file,
    tensor_header,
)
from tba.weights.pulling import LocalVersion
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

MANIFEST_NAME = "manifest.json"
DELTA_FILE_BYTES = 64 * 1024 * 1024
"""Most bytes of encoded tensors in one delta file; a larger encoded tensor gets a file of its own."""
BATCH_BYTES = 4 * 1024**3
"""Most bytes of tensors that are encoded at the same time; a larger tensor is encoded alone."""
MODEL_CONFIG_NAME = "config.json"
NOT_TOKENIZER = (MODEL_CONFIG_NAME, "generation_config.json")
_NOT_CONTENT = {"schema_version", "created_at_s", "canary", "torch_version", "transformers_version"}
_REPRESENTATION = {"tensors", "full", "delta", "adapter"}
"""Manifest fields that say how a version is stored; its tensors are compared by `params_sha256`."""
log = get_logger("weights")


def version_prefix(run: str, version: PolicyVersion) -> str:
    """Return the common prefix of the store keys of a version."""
    return f"runs/{run}/weights/{version}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """Conditions for storing a version as a delta."""

    keyframe_interval: int = 16
    """One version out of this many is stored whole, so that chains of deltas stay short."""
    max_share: float = 0.5
    """Use a delta only if its bytes are at most this share of the bytes of the tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The tensors of a version, how they are stored, and the function that uploads them."""

    tensors: list[TensorEntry]
    full: list[TensorFile] = field(default_factory=list)
    delta: Delta | None = None
    adapter: Adapter | None = None
    upload: Callable[[], None]


class NewVersion(TypedDict):
    """Arguments of `WeightVersions.publish`: a version that is to be stored."""

    version: PolicyVersion
    parent: PolicyVersion | None
    dtype: str
    """Dtype of the stored tensors: float32, bfloat16 or float16."""
    tensors_paths: Sequence[Path] | AdapterFile
    """Local safetensors files with the tensors of `model.named_parameters()`, stored under their file names; or an
    adapter, which needs the starting model as `base`."""
    files: Mapping[str, Path]
    """File name -> path; `config.json` and the tokenizer's files."""
    canary: Canary
    torch_version: str
    transformers_version: str
    base: NotRequired[LocalVersion | None]
    """An older version whose files are on this machine, as the base of a delta; None: the version is stored whole."""
    deltas: NotRequired[DeltaSettings | None]
    """Conditions for storing the version as a delta; None: the defaults."""
    others: NotRequired[OtherShares | None]
    """Other processes, which store the tensors that `tensors_paths` lacks; None: `tensors_paths` holds all tensors."""


class VersionWriter:
    """Writes versions of one run.

    Args:
        manifest: returns the manifest of a version of the run.
    """

    def __init__(self, store: ObjectStore, run: str, manifest: Callable[[PolicyVersion], Manifest]) -> None:
        self._store, self._run, self._manifest = store, run, manifest
        self._checked = CheckedFiles()

    def publish(self, new: NewVersion) -> Manifest:
        """Store a version (see `WeightVersions.publish`)."""
        version, files = new["version"], new["files"]
        if MODEL_CONFIG_NAME not in files:
            raise MalformedError(f"weight version {version}: files hold no {MODEL_CONFIG_NAME}; got {sorted(files)}")
        # asked first: while the store is away, the tensors are not hashed and encoded
        manifest_key = version_prefix(self._run, version) + MANIFEST_NAME
        exists = self._store.size_bytes(manifest_key) is not None
        tensors_paths = new["tensors_paths"]
        paths = (tensors_paths.path,) if isinstance(tensors_paths, AdapterFile) else tensors_paths
        # encoded files are beside the tensors, where there is room
        with tempfile.TemporaryDirectory(prefix=".delta-", dir=paths[0].parent, ignore_cleanup_errors=True) as folder:
            manifest, stored = self._describe(new, Path(folder))
            data = encode_manifest(manifest)  # before an upload: it may be too large
            # to compare the manifests is cheap, and uploading the same tensors a second time is not
            if exists and (found := self._existing(manifest)) is not None:
                return found
            for each in manifest.files:
                put_file(self._store, each.key, each.size_bytes, files[each.name])
            stored.upload()
        try:
            # two trainers may publish the same version at once: create-only decides which of them made it
            self._store.put(manifest_key, data, create_only=True)
        except ObjectExistsError:
            if (found := self._existing(manifest)) is not None:
                return found
            raise
        return manifest

    def _describe(self, new: NewVersion, folder: Path) -> tuple[Manifest, _Stored]:
        """Return the manifest of a version; write its encoded changes into `folder` if it is stored as a delta."""
        version, files, tensors_paths = new["version"], new["files"], new["tensors_paths"]
        base, parent = new.get("base"), new["parent"]
        prefix = version_prefix(self._run, version)
        if isinstance(tensors_paths, AdapterFile):
            stored = self._describe_adapter(version, prefix, base, tensors_paths)
        else:
            share = Share(self._store, prefix, tensors_paths, folder, checked=self._checked)
            settings = new.get("deltas") or DeltaSettings()
            stored = self._describe_tensors(share, base, tensors_paths, settings, new.get("others"))
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

    def _describe_tensors(
        self,
        share: Share,
        base: LocalVersion | None,
        paths: Sequence[Path],
        settings: DeltaSettings,
        others: OtherShares | None,
    ) -> _Stored:
        """Have all processes hash and encode their shares, then choose: whole, a delta against `base`, or both."""
        total_bytes = sum(path.stat().st_size for path in paths) + (0 if others is None else others.size_bytes)
        max_bytes = settings.max_share * total_bytes
        against, num_to_full = None, 1
        if base is not None and base.manifest.run == self._run:  # else its version is of another run
            before = base.manifest
            if before.delta is not None and not before.is_full:
                num_to_full = before.delta.num_to_full + 1
            if num_to_full <= MAX_DELTAS:
                against = ShareBase(base.paths, {each.name: each.digest for each in before.tensors})
        if others is not None:
            others.begin_describe(None if against is None else against.digests, max_bytes=max_bytes)
        tables: list[ShareTable] = []
        try:
            tables.append(share.describe(against, max_bytes=max_bytes))
        finally:  # whatever happens here: none may be busy with the version when it is tried again
            if others is not None:
                tables += others.wait_described()
        delta = None
        # a process may have failed to encode its own, and all shares together may not pay
        if base is not None and against is not None and all(table.changes is not None for table in tables):
            objects = [each for table in tables for each in table.changes or ()]
            if len(tables) == 1 or sum(each.size_bytes for each in objects) <= max_bytes:
                delta = Delta(base=str(base.version), num_to_full=num_to_full, objects=objects)
        is_full = delta is None or num_to_full >= settings.keyframe_interval

        def upload() -> None:
            if others is not None:
                others.begin_upload(whole=is_full, changes=delta is not None)
            try:
                share.upload(whole=is_full, changes=delta is not None)
            finally:
                if others is not None:
                    others.wait_uploaded()
            for table in tables[1:]:
                full, changes = table.full if is_full else [], [] if delta is None else table.changes or []
                for each in (*full, *changes):
                    if self._store.size_bytes(each.key) != each.size_bytes:
                        raise StoreUnavailableError(
                            f"another process of this trainer has stored {each.key}, and it is not in "
                            f"{self._store.url}; all processes need the same store: a folder must be shared by their "
                            "machines (store.url)"
                        )

        return _Stored(
            tensors=[each for table in tables for each in table.tensors],
            full=[each for table in tables for each in table.full] if is_full else [],
            delta=delta,
            upload=upload,
        )

    def _describe_adapter(
        self, version: PolicyVersion, prefix: str, base: LocalVersion | None, file: AdapterFile
    ) -> _Stored:
        """Describe a version that is stored as an adapter for `base`, the starting model, whose files are verified."""
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
            base=str(base.version), rank=file.rank, alpha=file.alpha, fan_in_fan_out=file.fan_in_fan_out, stored=stored
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
        """Return the stored manifest of the same version, if its content is the same; None if there is no manifest.

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


class ShareTable(BaseModel):
    """The tensors of a share, and its store objects: `full` if stored whole, `changes` if stored as a delta."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensors: list[TensorEntry]
    full: list[TensorFile]
    changes: list[DeltaObject] | None
    """None: there is no base, the changes have too many bytes, or encoding them failed."""


@dataclass(frozen=True, slots=True)
class ShareBase:
    """An older version, against which a share encodes the changes of its tensors."""

    paths: Sequence[Path]
    """Local files with tensors of that version, at least those that the share needs."""
    digests: Mapping[str, str]
    """Tensor name -> digest, for all tensors of the version's manifest."""


class CheckedFiles:
    """Remember the digests of the files that this process hashed last, so that they are not hashed again as a base."""

    def __init__(self) -> None:
        self._known: tuple[FileStamps, Mapping[str, str]] | None = None

    def note(self, stamps: FileStamps, digests: Mapping[str, str]) -> None:
        """Remember the digests of all tensors of some files.

        Args:
            stamps: the files' `file_stamps`, taken before they were read.
        """
        self._known = stamps, digests

    def ensure(self, digests: Mapping[str, str], paths: Sequence[Path], check: Callable[[], None]) -> None:
        """Make sure that files hold tensors with the given digests: run `check`, unless their digests are remembered.

        Raises:
            DigestError, MalformedError, StoreError: raised by `check`.
        """
        stamps = file_stamps(paths)
        if self._known is not None and self._known[0] == stamps and self._known[1].items() <= digests.items():
            return
        check()
        names = {name for path in paths for name in tensor_header(path)}
        self.note(stamps, {name: digest for name, digest in digests.items() if name in names})


class Share:
    """Stores one process's tensors of a version.

    Args:
        prefix: common prefix of the keys of the version.
        paths: the safetensors files with the tensors; empty when there are more processes than tensors.
        folder: for encoded changes; the caller deletes it.
        checked: the digests of files that this process has hashed.
        stem: beginning of the names of delta files, different in every process.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        paths: Sequence[Path],
        folder: Path,
        *,
        checked: CheckedFiles,
        stem: str = "delta",
    ) -> None:
        self._store, self._prefix, self._paths, self._folder, self._stem = store, prefix, paths, folder, stem
        self._checked = checked
        self._files: dict[str, Path] = {}
        self._table = ShareTable(tensors=[], full=[], changes=None)

    def describe(self, base: ShareBase | None, *, max_bytes: float) -> ShareTable:
        """Hash the tensors, and encode what has changed since `base`.

        Args:
            max_bytes: limit of the encoded changes of all shares together. When this share alone exceeds it, encoding
                stops, and the table has no changes.

        Raises:
            MalformedError: not a safetensors file.
            StoreError: a file cannot be read.
        """
        stamps = file_stamps(self._paths)
        tensors = describe_tensors(self._paths)
        full = [
            TensorFile(name=path.name, key=self._prefix + path.name, size_bytes=path.stat().st_size)
            for path in self._paths
        ]
        changes, paths = None, None if base is None else self._encode(base, max_bytes)
        if paths is not None:
            changes = [describe_changes(self._prefix, path, stem=path.stem) for path in paths]
            self._files = {stored.key: path for stored, path in zip(changes, paths, strict=True)}
        self._table = ShareTable(tensors=tensors, full=full, changes=changes)
        self._checked.note(stamps, {each.name: each.digest for each in tensors})  # the next version's base
        return self._table

    def upload(self, *, whole: bool, changes: bool) -> None:
        """Upload the tensors (`whole`), their encoded changes, or both. Objects that exist already are kept.

        An existing file of tensors is downloaded, and its tensors are compared.

        Raises:
            ObjectExistsError: an existing file of the version holds other tensors.
            StoreUnavailableError
        """
        if changes:
            for stored in self._table.changes or ():
                put_file(self._store, stored.key, stored.size_bytes, self._files[stored.key])
        if whole:
            for stored, path in zip(self._table.full, self._paths, strict=True):
                self._put_full(stored, path)

    def _encode(self, base: ShareBase, max_bytes: float) -> list[Path] | None:
        if not self._paths:
            return []
        started = time.monotonic()
        try:
            # a delta against files that are not the base that others have would be of no use to anyone
            self._checked.ensure(base.digests, base.paths, lambda: check_digests(base.digests, base.paths))
            paths = encode_changes(base.paths, self._paths, self._folder, stem=self._stem, max_bytes=max_bytes)
        except (StoreError, MalformedError) as error:  # the version is stored whole, which needs none of it
            log.warning("delta_not_made", prefix=self._prefix, reason=str(error))
            return None
        pays = paths is not None
        log.info("delta_encoded", prefix=self._prefix, pays=pays, encode_s=round(time.monotonic() - started, 3))
        return paths

    def _put_full(self, stored: TensorFile, path: Path) -> None:
        try:
            self._store.put_file(stored.key, path, create_only=True)
        except ObjectExistsError:
            # a trainer killed after the upload leaves the same tensors, and they may be published; others never
            members = {entry.name: entry for entry in self._table.tensors if entry.file == stored.name}
            with tempfile.TemporaryDirectory(prefix="tba-compare-") as folder:
                found = Path(folder) / stored.name
                self._store.get_file(stored.key, found)
                try:
                    is_same = found.stat().st_size == stored.size_bytes
                    is_same = is_same and {entry.name: entry for entry in describe_tensors([found])} == members
                except (DigestError, MalformedError):
                    is_same = False
            if not is_same:
                raise ObjectExistsError(
                    f"{stored.key} in {self._store.url} holds other tensors; another trainer published it, or was "
                    "killed while it did: take a new lineage, or delete the object"
                ) from None


class OtherShares(Protocol):
    """The shares of a version that other processes store. Call each `wait_` method after its `begin_` method."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the other processes' tensors."""
        ...

    def begin_describe(self, base: Mapping[str, str] | None, *, max_bytes: float) -> None:
        """Start `Share.describe` in the other processes.

        Args:
            base: digests of the base's tensors; None: there is no base.
        """
        ...

    def wait_described(self) -> list[ShareTable]:
        """Wait for the other processes; return the table of each."""
        ...

    def begin_upload(self, *, whole: bool, changes: bool) -> None:
        """Start `Share.upload` in the other processes."""
        ...

    def wait_uploaded(self) -> None:
        """Wait until every other process has uploaded its share."""
        ...


def describe_changes(prefix: str, path: Path, *, stem: str) -> DeltaObject:
    """Hash a delta file or an adapter; return its store object, with the key `prefix` + STEM-DIGEST.SUFFIX."""
    # named by its content: what a killed trainer left under the version never stands in the way
    digest = digest_of_file(path)
    name = f"{stem}-{digest}{path.suffix}"
    return DeltaObject(name=name, key=prefix + name, size_bytes=path.stat().st_size, digest=digest)


def put_file(store: ObjectStore, key: str, size_bytes: int, path: Path) -> None:
    """Upload a file under a key that contains its digest, unless an object of that size is there already."""
    if store.size_bytes(key) != size_bytes:
        store.put_file(key, path)


def encode_changes(
    old_paths: Sequence[Path], new_paths: Sequence[Path], folder: Path, *, max_bytes: float, stem: str = "delta"
) -> list[Path] | None:
    """Encode the changes from the tensors of `old_paths` to those of `new_paths` into delta files in `folder`.

    Args:
        max_bytes: limit of all encoded changes together.
        stem: beginning of the names of the delta files.

    Returns:
        The paths of the delta files, at least one; None when the changes exceed `max_bytes`.

    Raises:
        MalformedError, StoreError: as `open_tensors`; StoreError: the local disk is full.
    """
    paths: list[Path] = []
    pending: dict[str, NDArray[np.uint8]] = {}
    total_bytes = pending_bytes = 0

    def flush() -> None:
        path = folder / f"{stem}-{len(paths) + 1:05d}.safetensors"
        try:
            save_file(pending, path)
        except SafetensorError as error:
            raise StoreError(f"delta {path} cannot be written: {explain_no_space(folder) or error}") from error
        paths.append(path)
        pending.clear()

    old, new = open_tensors(old_paths), open_tensors(new_paths)

    def encode(name: str) -> bytes | None:
        dtype, _, raw = new[name]
        before = old.get(name)
        return encode_tensor(before[2] if before is not None and before[0] == dtype else None, raw, dtype)

    for some in _batches(new):
        encoded_tensors = in_parallel(encode, some, size_bytes=bytes_of(new[name] for name in some))
        for name, encoded in zip(some, encoded_tensors, strict=True):
            if encoded is None:
                continue
            if pending and pending_bytes + len(encoded) > DELTA_FILE_BYTES:
                flush()
                pending_bytes = 0
            pending[name] = np.frombuffer(encoded, np.uint8)
            pending_bytes += len(encoded)
            total_bytes += len(encoded)
            if total_bytes > max_bytes:
                return None
    flush()
    return paths


def _batches(tensors: Mapping[str, RawTensor]) -> Iterator[list[str]]:
    """Yield the tensor names in batches that are small enough to hold all encoded tensors of a batch in memory."""
    batch: list[str] = []
    size_bytes = 0
    for name, (_, _, raw) in tensors.items():
        if batch and (len(batch) == 4 * num_threads() or size_bytes + raw.nbytes > BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(name)
        size_bytes += raw.nbytes
    yield batch
