"""Digests of tensors: xxh3-128 of the raw bytes of each, and one sha256 over the table of them all.

xxhash releases the interpreter's lock, and tensors are independent, so several threads hash at once.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128_hexdigest

from tba.errors import DigestError, MalformedError, StoreError
from tba.fields import first_problem
from tba.wire.weight_manifest import Manifest, TensorEntry, table_sha256

RawTensor = tuple[str, tuple[int, ...], NDArray[np.uint8]]
"""Dtype as safetensors writes it, shape, raw little-endian bytes."""
FileStamps = tuple[tuple[str, int, int], ...]
"""Path, modification time in ns and size in bytes of each file, to detect that a file has changed."""
_SEVERAL_THREADS_BYTES = 4 * 2**20
"""Below this size one thread is faster: starting several costs 0.3 ms of CPU time, hashing 512 KB costs 10 us."""
In = TypeVar("In")
Out = TypeVar("Out")


def num_threads() -> int:
    """Return the number of threads that work on tensors: one per core that this process may use, 8 at most."""
    return min(8, len(os.sched_getaffinity(0)))


def in_parallel(work: Callable[[In], Out], items: Iterable[In], *, size_bytes: int) -> list[Out]:
    """Apply `work` to every item in several threads; return the results in order, or raise the first error.

    Args:
        size_bytes: total size of the items; if it is small, the calling thread does the work.
    """
    if size_bytes < _SEVERAL_THREADS_BYTES:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads(), "tensors") as pool:
        return list(pool.map(work, items))


def bytes_of(tensors: Iterable[RawTensor]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(raw.nbytes for _, _, raw in tensors)


def tensor_digest(raw: NDArray[np.uint8] | bytes | memoryview) -> str:
    """Return the xxh3-128 of a tensor's raw bytes, 32 hex digits."""
    return xxh3_128_hexdigest(raw)  # pyright: ignore[reportArgumentType]  # arrays are buffers from Python 3.12 on


def params_sha256(tensors: Mapping[str, RawTensor]) -> str:
    """Return the `params_sha256` of named tensors, which does not depend on their order."""
    digests = in_parallel(lambda item: tensor_digest(item[2]), tensors.values(), size_bytes=bytes_of(tensors.values()))
    return table_sha256(
        (name, dtype, shape, digest) for (name, (dtype, shape, _)), digest in zip(tensors.items(), digests, strict=True)
    )


def params_sha256_of_files(paths: Sequence[Path]) -> str:
    """Return the `params_sha256` of all tensors of safetensors files, which does not depend on how files divide them.

    Raises:
        MalformedError: not a safetensors file, or a tensor is in two files.
        StoreError: a file cannot be read.
    """
    return params_sha256(open_tensors(paths))


def describe_tensors(paths: Sequence[Path]) -> list[TensorEntry]:
    """Hash every tensor of safetensors files; return one manifest entry per tensor.

    Raises:
        MalformedError: as `params_sha256_of_files`, or no manifest may name a tensor, for example of an unknown dtype.
        StoreError: as `params_sha256_of_files`.
    """
    tensors = open_tensors(paths)
    file_of = {name: path.name for path in paths for name in tensor_header(path)}
    digests = in_parallel(lambda item: tensor_digest(item[2]), tensors.values(), size_bytes=bytes_of(tensors.values()))
    try:
        return [
            TensorEntry(name=name, dtype=dtype, shape=list(shape), file=file_of[name], digest=digest)
            for (name, (dtype, shape, _)), digest in zip(tensors.items(), digests, strict=True)
        ]
    except ValidationError as error:
        raise MalformedError(f"tensors of {', '.join(map(str, paths))}: {first_problem(error)}") from None


def check_tensors_of(manifest: Manifest, paths: Sequence[Path]) -> None:
    """Check that files hold exactly the tensors of a manifest.

    Raises:
        DigestError: a tensor differs, is missing, or is not in the manifest.
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
    """Check the digest of every tensor in some files; `digests` may name more tensors than the files hold.

    Raises:
        DigestError: a tensor differs, or `digests` lacks it.
        MalformedError: not a safetensors file.
        StoreError: a file cannot be read.
    """

    def check(item: tuple[str, RawTensor]) -> None:
        name, (_, _, raw) = item
        if (found := tensor_digest(raw)) != digests.get(name):
            raise DigestError(f"tensor {name!r} has the digest {found} here, expected {digests.get(name)}")

    tensors = open_tensors(paths)
    in_parallel(check, tensors.items(), size_bytes=bytes_of(tensors.values()))


def open_tensors(paths: Sequence[Path]) -> dict[str, RawTensor]:
    """Map safetensors files into memory, and return tensor name -> a view of the mapped bytes.

    The files may be larger than memory. A file may be deleted while views of it exist: the mapping lasts as long as
    they do. Format: 8 bytes little-endian header length, JSON header, data (huggingface.co/docs/safetensors).

    Raises:
        MalformedError: not a safetensors file, or a tensor is in two files.
        StoreError: a file cannot be read.
    """
    tensors: dict[str, RawTensor] = {}
    for path in paths:
        header = tensor_header(path)
        with _reading(path), path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        # tensor_header has checked the length and the offsets
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in header.items():
            if name in tensors:
                raise MalformedError(f"tensor {name!r} is in {path} and in another file of the same version")
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), data[start + begin : start + end])
    return tensors


def tensor_header(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Read the header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Raises:
        MalformedError: not a safetensors file.
        StoreError: the file cannot be read.
    """
    try:
        # `safe_open` checks the header: lengths, offsets, no holes, no overlaps
        with _reading(path), safe_open(path, framework="np"), path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except SafetensorError as error:
        raise MalformedError(f"file {path} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header


def sha256_of_file(path: Path) -> str:
    """Return the lower-case hex sha256 of a file's bytes.

    Raises:
        StoreError: the file cannot be read.
    """
    with _reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_stamps(paths: Iterable[Path | str]) -> FileStamps:
    """Return path, modification time and size of each file, sorted by path, without duplicates.

    Raises:
        StoreError: a file is missing or cannot be read.
    """
    try:
        return tuple((path, (stat := os.stat(path)).st_mtime_ns, stat.st_size) for path in sorted(set(map(str, paths))))
    except OSError as error:
        raise StoreError(f"file {error.filename} cannot be read: {error.strerror}") from None


def digest_of_file(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes, 32 hex digits.

    Raises:
        StoreError: the file cannot be read.
    """
    with _reading(path):
        data = np.fromfile(path, np.uint8) if path.stat().st_size < 2**28 else np.memmap(path, np.uint8, "r")
        return tensor_digest(data)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror or error}") from error
