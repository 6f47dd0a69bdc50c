"""Weight versions in the store (publish, find, download, delete), and the digests that prove what they hold.

    runs/<run>/weights/<lineage>-<step>/model.safetensors   written first, create-only; a large model in several files:
                                        model-00001-of-00003.safetensors, ...
    runs/<run>/files/<sha256>/<name>                        config and tokenizer, shared by versions, named by content
    runs/<run>/weights/<lineage>-<step>/manifest.json       written last, create-only: until it exists, nothing does

Everything is immutable. A folder `<lineage>-<step>/` without a manifest was left by a trainer that was killed while it
wrote or deleted the version. It is no version; publishing it again completes it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from tba.errors import DigestError, MalformedError, ObjectExistsError, ObjectNotFoundError, StoreError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.wire.weight_manifest import (
    MAX_MANIFEST_BYTES,
    Canary,
    Manifest,
    StoredObject,
    decode_manifest,
    encode_manifest,
    params_digest,
    sha256_hex,
)

MANIFEST_NAME = "manifest.json"
log = get_logger("weights")


def checkpoint_prefix(run: str) -> str:
    """Return what the keys of a run's checkpoints begin with."""
    return f"runs/{run}/checkpoints/"


def complete_versions(store: ObjectStore, prefix: str) -> list[PolicyVersion]:
    """Return the versions whose folders under `prefix` have a manifest, oldest lineage first.

    Args:
        prefix: ends with a slash; folders under it that are not named like a version are left out.

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


def delete_incomplete(
    store: ObjectStore, prefix: str, *, before_lineage: int, keep: Collection[PolicyVersion]
) -> list[PolicyVersion]:
    """Delete the folders under `prefix` that have no manifest and are of older lineages.

    Args:
        prefix: ends with a slash; folders under it that are not named like a version stay.
        before_lineage: the lineage of a trainer that may be writing now; only older ones are touched.
        keep: never deleted.

    Returns:
        The versions whose folders were deleted, oldest first.

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
    deleted = []
    for version, keys in sorted(folders.items()):
        # an incomplete folder of the newest lineage may be one that a live trainer is writing now
        is_complete = f"{prefix}{version}/{MANIFEST_NAME}" in keys
        if is_complete or version.lineage >= before_lineage or version in keep:
            continue
        for key in keys:
            store.delete(key)
        deleted.append(version)
    return deleted


INDEX_NAME = "model.safetensors.index.json"
"""Maps tensors to files; Hugging Face loaders read it if there are several files."""
MODEL_CONFIG_NAME = "config.json"
_NOT_TOKENIZER = (MODEL_CONFIG_NAME, "generation_config.json")
_NOT_CONTENT = {"created_at_s", "canary", "torch_version", "transformers_version"}


class WeightVersions:
    """The weight versions of one run in one store."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run

    def publish(
        self,
        *,
        version: PolicyVersion,
        parent: PolicyVersion | None,
        dtype: str,
        tensors_paths: Sequence[Path],
        files: Mapping[str, Path],
        canary: Canary,
        torch_version: str,
        transformers_version: str,
    ) -> Manifest:
        """Make a version exist: objects first, manifest last. Publishing the same content again is accepted.

        Content is the tensors, the files, the dtype and the parent; of two canaries of the same content the first
        stays.

        Args:
            dtype: float32, bfloat16 or float16; what the tensors are stored as.
            tensors_paths: safetensors files with `model.named_parameters()`, stored under their names.
            files: file name -> path; `config.json` and the tokenizer's files.

        Returns:
            The manifest that is in the store.

        Raises:
            ObjectExistsError: the version exists with other content.
            MalformedError: `config.json` is missing, one of `tensors_paths` is not a safetensors file, or a field is
                wrong.
            StoreUnavailableError
        """
        if MODEL_CONFIG_NAME not in files:
            raise MalformedError(f"weight version {version}: files hold no {MODEL_CONFIG_NAME}; got {sorted(files)}")
        try:
            tensors = [self._describe_tensors(version, path) for path in tensors_paths]
            stored_files = [self._describe_file(name, files[name]) for name in sorted(files)]
            manifest = Manifest(
                run=self._run,
                version=str(version),
                parent=None if parent is None else str(parent),
                dtype=dtype,  # pyright: ignore[reportArgumentType]  # the model checks it
                tensors=tensors,
                files=stored_files,
                model_config_sha256=next(f.sha256 for f in stored_files if f.name == MODEL_CONFIG_NAME),
                tokenizer_sha256=_tokenizer_sha256(stored_files),
                params_sha256=params_sha256_of_files(tensors_paths),
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
        # to compare the manifests is cheap, and uploading the same tensors a second time is not
        if self.exists(version):
            return self._require_same_content(manifest)
        for stored in stored_files:
            self._put_file(stored, files[stored.name])
        for stored, path in zip(tensors, tensors_paths, strict=True):
            self._put_tensors(version, stored, path)
        try:
            # two trainers may publish the same version at once: create-only decides which of them made it
            self._store.put(self._key(version, "manifest.json"), encode_manifest(manifest), create_only=True)
        except ObjectExistsError:
            return self._require_same_content(manifest)
        return manifest

    def manifest(self, version: PolicyVersion) -> Manifest:
        """Read the manifest of a version.

        Raises:
            ObjectNotFoundError: the version does not exist (yet).
            MalformedError: the document is too large, or is not a manifest of this run and version.
        """
        key = self._key(version, "manifest.json")
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
        """Return whether the manifest is there."""
        return self._store.size_bytes(self._key(version, "manifest.json")) is not None

    def versions(self) -> list[PolicyVersion]:
        """Return every version that exists, oldest lineage first."""
        return complete_versions(self._store, f"runs/{self._run}/weights/")

    def download(self, version: PolicyVersion, folder: Path) -> Manifest:
        """Download tensors and files into `folder`, all or none, each verified; several files of tensors get an index.

        Raises:
            ObjectNotFoundError: the version does not exist.
            DigestError: naming the object whose bytes are not what the manifest says.
        """
        manifest = self.manifest(version)
        self._download([*manifest.tensors, *manifest.files], folder)
        if len(manifest.tensors) > 1:
            write_index(folder, [folder / stored.name for stored in manifest.tensors])
        return manifest

    def download_tensors(self, version: PolicyVersion, folder: Path) -> tuple[Manifest, list[Path]]:
        """Download the tensors alone into `folder`, all or none, each verified; return the manifest and the files.

        Raises:
            ObjectNotFoundError, DigestError
        """
        manifest = self.manifest(version)
        self._download(manifest.tensors, folder)
        return manifest, [folder / stored.name for stored in manifest.tensors]

    def read_file(self, version: PolicyVersion, name: str) -> bytes | None:
        """Return one of the files of a version (config, tokenizer), verified; None: the version has no such file.

        Raises:
            ObjectNotFoundError: the version does not exist.
            DigestError: the bytes are not what the manifest says.
        """
        stored = next((file for file in self.manifest(version).files if file.name == name), None)
        if stored is None:
            return None
        if (size_bytes := self._store.size_bytes(stored.key)) not in (None, stored.size_bytes):  # it may be huge
            raise self._damage_error(stored, f"{size_bytes} bytes")
        data = self._store.get(stored.key)
        if (found := sha256_hex(data)) != stored.sha256:
            raise self._damage_error(stored, f"{len(data)} bytes with sha256 {found}")
        return data

    def delete(self, version: PolicyVersion) -> None:
        """Delete a version, manifest first, so that it never exists by half. Files shared by content stay."""
        # a reader that has the manifest already misses an object soon, which it takes for a version that is gone
        self._store.delete(self._key(version, "manifest.json"))
        for key in self._store.list(self._key(version, "")):
            self._store.delete(key)

    def delete_incomplete(self, *, before_lineage: int, keep: Collection[PolicyVersion] = ()) -> list[PolicyVersion]:
        """Delete versions of older lineages that have no manifest, except `keep`; returns what was deleted."""
        prefix = f"runs/{self._run}/weights/"
        return delete_incomplete(self._store, prefix, before_lineage=before_lineage, keep=keep)

    def _key(self, version: PolicyVersion, name: str) -> str:
        return f"runs/{self._run}/weights/{version}/{name}"

    def _describe_tensors(self, version: PolicyVersion, path: Path) -> StoredObject:
        sha256, key = sha256_of_file(path), self._key(version, path.name)
        return StoredObject(name=path.name, key=key, size_bytes=path.stat().st_size, sha256=sha256)

    def _describe_file(self, name: str, path: Path) -> StoredObject:
        sha256 = sha256_of_file(path)
        key = f"runs/{self._run}/files/{sha256}/{name}"
        return StoredObject(name=name, key=key, size_bytes=path.stat().st_size, sha256=sha256)

    def _put_file(self, stored: StoredObject, path: Path) -> None:
        if self._store.size_bytes(stored.key) != stored.size_bytes:  # else it is there: the key names the content
            self._store.put_file(stored.key, path)

    def _put_tensors(self, version: PolicyVersion, tensors: StoredObject, path: Path) -> None:
        try:
            self._store.put_file(tensors.key, path, create_only=True)
        except ObjectExistsError:
            with tempfile.TemporaryDirectory(prefix="tba-compare-") as folder:
                # a trainer killed after the upload leaves the same bytes, and they may be published; other bytes never
                found = Path(folder) / tensors.name
                self._store.get_file(tensors.key, found)
                if sha256_of_file(found) == tensors.sha256:
                    return
            raise ObjectExistsError(
                f"weight version {version} of run {self._run}: {tensors.key} in {self._store.url} holds other tensors; "
                "another trainer published it, or was killed while it did: take a new lineage, or delete the object"
            ) from None

    def _require_same_content(self, manifest: Manifest) -> Manifest:
        found = self.manifest(manifest.policy_version)
        if found.model_dump(exclude=_NOT_CONTENT) != manifest.model_dump(exclude=_NOT_CONTENT):
            different = [
                name
                for name in Manifest.model_fields
                if name not in _NOT_CONTENT and getattr(found, name) != getattr(manifest, name)
            ]
            raise ObjectExistsError(
                f"weight version {manifest.version} of run {self._run} exists with other content "
                f"({', '.join(different)} differ); versions are immutable: take a new lineage"
            )
        return found

    def _download(self, objects: Sequence[StoredObject], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # in the same folder, so that the renames below cannot cross file systems
        incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder))
        try:
            for stored in objects:
                path = incoming / stored.name
                size_bytes = self._store.size_bytes(stored.key)
                if (
                    size_bytes is not None and size_bytes != stored.size_bytes
                ):  # check first: it may be larger than the disk
                    raise self._damage_error(stored, f"{size_bytes} bytes")
                self._store.get_file(stored.key, path)
                size_bytes, found = path.stat().st_size, sha256_of_file(path)
                if size_bytes != stored.size_bytes or found != stored.sha256:
                    raise self._damage_error(stored, f"{size_bytes} bytes with sha256 {found}")
            for stored in objects:
                # only when every file is verified: an engine never sees a mixture of two versions
                os.replace(incoming / stored.name, folder / stored.name)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def _damage_error(self, stored: StoredObject, found: str) -> DigestError:
        return DigestError(
            f"object {stored.key} in {self._store.url} is damaged: {found}, the manifest says {stored.size_bytes} "
            f"bytes with {stored.sha256}; pull again; if the error remains, delete the version"
        )


def write_index(folder: Path, tensors_paths: Sequence[Path]) -> None:
    """Write `model.safetensors.index.json` for the tensors of several files in `folder`."""
    files = {name: path.name for path in tensors_paths for name in tensor_header(path)}
    size_bytes = sum(path.stat().st_size for path in tensors_paths)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": files}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))


def _tokenizer_sha256(files: Sequence[StoredObject]) -> str:
    """Return the sha256 over `name sha256` lines of every file except the configs of model and generation."""
    lines = [f"{file.name} {file.sha256}\n" for file in files if file.name not in _NOT_TOKENIZER]
    return sha256_hex("".join(lines).encode())


def sha256_of_file(path: Path) -> str:
    """Return the lower-case hex sha256 of a file's bytes.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror}") from error


def params_sha256_of_files(paths: Sequence[Path]) -> str:
    """Return the `params_digest` over every tensor of safetensors files: names, dtypes as safetensors writes them
    ("F32", "BF16", "F16"), shapes and raw little-endian bytes. The distribution of tensors over files does not matter.

    Format: 8 bytes little-endian header length, JSON header, data (huggingface.co/docs/safetensors).

    Raises:
        MalformedError: not a safetensors file, or a tensor is in two files.
        StoreError: a file cannot be read.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
    with ExitStack() as stack:
        for path in paths:
            header = tensor_header(path)
            try:
                # mapped and not read: the files may be larger than memory
                file = stack.enter_context(path.open("rb"))
                data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except OSError as error:
                raise StoreError(f"file {path} cannot be read: {error}") from error
            # tensor_header has checked the length and the offsets
            start = 8 + int.from_bytes(data[:8], "little")
            view = stack.enter_context(memoryview(data))
            for name, entry in header.items():
                if name in tensors:
                    raise MalformedError(f"tensor {name!r} is in {path} and in another file of the same version")
                begin, end = entry["data_offsets"]
                raw = stack.enter_context(view[start + begin : start + end])
                tensors[name] = (entry["dtype"], tuple(entry["shape"]), raw)
        return params_digest(tensors)


def tensor_header(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Read the header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Raises:
        MalformedError: not a safetensors file.
        StoreError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="np"):  # checks the header: lengths, offsets, no holes, no overlaps
            pass
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except SafetensorError as error:
        raise MalformedError(f"file {path} is not a whole safetensors file: {error}") from error
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    return header
