"""Tensors of one version out of those of another: encode the changes between files, and apply them again.

    encode_changes   files of two versions -> delta files (safetensors files with the encoded bytes of changed tensors)
    assemble         files of a base and the delta files of one or more versions -> verified files of the last one
    merge            files of the starting model and an adapter -> verified files of a version
    check_tensors_of downloaded files -> the digest of every tensor is the manifest's
    check_digests    files with some of a version's tensors -> each has its digest

Tensors are independent: several threads work on one tensor each, and no more than these tensors are in memory at once.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tba.errors import DigestError, MalformedError, StoreError, StoreUnavailableError
from tba.store.file import explain_full_disk, explain_no_space
from tba.weights.adapter import merge_into, read_adapter
from tba.weights.delta import SEGMENT_ELEMENTS, apply_tensor, encode_tensor
from tba.weights.digest import (
    RawTensor,
    bytes_of,
    describe_tensors,
    in_parallel,
    num_threads,
    open_tensors,
    tensor_digest,
)
from tba.wire.weight_manifest import DTYPE_BYTES, Adapter, Manifest, TensorEntry

DELTA_FILE_BYTES = 64 * 1024 * 1024
"""Of encoded tensors in one delta file; a larger one has a file of its own."""
BATCH_BYTES = 4 * 1024**3
"""Of tensors that are encoded at once; a larger one is encoded by itself."""


def encode_changes(
    old_paths: Sequence[Path], new_paths: Sequence[Path], folder: Path, *, max_bytes: float, stem: str = "delta"
) -> list[Path] | None:
    """Write what turns the tensors of `old_paths` into those of `new_paths` to delta files in `folder`.

    Args:
        max_bytes: of all delta files together.
        stem: what their names begin with.

    Returns:
        The files, at least one; None when they would have more than `max_bytes`.

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
    """Yield the names in batches whose encoded tensors, which may be as large as they are, fit into memory."""
    batch: list[str] = []
    size_bytes = 0
    for name, (_, _, raw) in tensors.items():
        if batch and (len(batch) == 4 * num_threads() or size_bytes + raw.nbytes > BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(name)
        size_bytes += raw.nbytes
    yield batch


def assemble(
    manifest: Manifest, base_paths: Sequence[Path], steps: Sequence[tuple[Manifest, Sequence[Path]]], folder: Path
) -> list[Path]:
    """Write the verified files of a version to `folder`.

    Args:
        manifest: of the version.
        base_paths: the files of the version that the first step starts from.
        steps: manifest and delta files of each version on the way, oldest first; the last one is of `manifest`.

    Returns:
        One file for each that the manifest's tensors name.

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
    outputs = _create_files(manifest.tensors, folder)

    def build(entry: TensorEntry) -> None:
        out = outputs[entry.name]
        current, encoded = plans[entry.name]
        for each in encoded:
            apply_tensor(each, current, out, entry.dtype)
            current = out
        if current is not None and current is not out:
            np.copyto(out, current)
        _check_digest(manifest, entry, out)

    in_parallel(build, manifest.tensors, size_bytes=sum(out.nbytes for out in outputs.values()))
    return [folder / name for name in dict.fromkeys(entry.file for entry in manifest.tensors)]


def merge(manifest: Manifest, base: Mapping[str, RawTensor], adapter: Adapter, path: Path, folder: Path) -> list[Path]:
    """Write the verified files of a version that is an adapter to `folder`.

    Args:
        manifest: of the version.
        base: tensors of the starting model.
        path: file of the adapter.

    Returns, raises: as `assemble`.
    """
    layers = read_adapter(adapter, path, base)
    for entry in manifest.tensors:  # before room is made: the sizes are a stranger's
        if entry.name not in base or (entry.dtype, tuple(entry.shape)) != base[entry.name][:2]:
            raise MalformedError(
                f"tensor {entry.name!r} of version {manifest.version} is {entry.dtype} {entry.shape}, and the starting "
                f"model, which its adapter is for, has {list(base[entry.name][:2]) if entry.name in base else 'none'}"
            )
    outputs = _create_files(manifest.tensors, folder)

    def build(entry: TensorEntry) -> None:
        out, weight = outputs[entry.name], base[entry.name]
        if entry.name in layers:
            merge_into(weight, layers[entry.name], out)
        else:
            np.copyto(out, weight[2])
        _check_digest(manifest, entry, out)

    in_parallel(build, manifest.tensors, size_bytes=sum(out.nbytes for out in outputs.values()))
    return [folder / name for name in dict.fromkeys(entry.file for entry in manifest.tensors)]


def check_tensors_of(manifest: Manifest, paths: Sequence[Path]) -> None:
    """Check that files hold exactly the tensors of a manifest.

    Raises:
        DigestError: a tensor differs, is missing, or is none of the manifest's.
        MalformedError: not a safetensors file.
        StoreError: a file cannot be read.
    """
    found = {each.name: (each.dtype, each.shape, each.digest) for each in describe_tensors(paths)}
    expected = {each.name: (each.dtype, each.shape, each.digest) for each in manifest.tensors}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise DigestError(
                f"tensor {name!r} of weight version {manifest.version} is {found.get(name, 'missing')}, the manifest "
                f"says {expected.get(name, 'nothing of it')}"
            )


def check_digests(digests: Mapping[str, str], paths: Sequence[Path]) -> None:
    """Check that every tensor of some files has the digest that it is to have; there may be more tensors elsewhere.

    Raises:
        DigestError: a tensor differs, or has no digest.
        MalformedError: not a safetensors file.
        StoreError: a file cannot be read.
    """

    def check(item: tuple[str, RawTensor]) -> None:
        name, (_, _, raw) = item
        if (found := tensor_digest(raw)) != digests.get(name):
            raise DigestError(f"tensor {name!r} has the digest {found} here, expected {digests.get(name)}")

    tensors = open_tensors(paths)
    in_parallel(check, tensors.items(), size_bytes=bytes_of(tensors.values()))


def _plan(
    wanted: TensorEntry,
    before: RawTensor | None,
    tables: Sequence[Mapping[str, TensorEntry]],
    changes: Sequence[Mapping[str, RawTensor]],
) -> tuple[NDArray[np.uint8] | None, list[memoryview]]:
    """Return the bytes that a tensor starts from (None: it starts as a whole one), and what to apply, oldest first."""
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


def _check_digest(manifest: Manifest, entry: TensorEntry, raw: NDArray[np.uint8]) -> None:
    if (found := tensor_digest(raw)) != entry.digest:
        raise DigestError(
            f"tensor {entry.name!r} of weight version {manifest.version} has the digest {found}, the manifest says "
            f"{entry.digest}"
        )


def _create_files(entries: Sequence[TensorEntry], folder: Path) -> dict[str, NDArray[np.uint8]]:
    """Create safetensors files with room for tensors; return a writable view [size_bytes] of each tensor.

    Format: 8 bytes little-endian header length, JSON header, data (huggingface.co/docs/safetensors).
    """
    views: dict[str, NDArray[np.uint8]] = {}
    for name in dict.fromkeys(entry.file for entry in entries):
        # wide dtypes first, as the library writes them: then each tensor is aligned
        members = sorted(
            (entry for entry in entries if entry.file == name),
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
    return views
