"""Digests of files, and of the parameters inside a safetensors file, without torch."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tba.errors import MalformedError, StoreError
from tba.wire.manifest import params_digest


def sha256_of_file(path: Path) -> str:
    """Lower-case hex sha256 of a file's bytes.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror}") from error


def params_sha256_of_file(path: Path) -> str:
    """`params_digest` over every tensor of a safetensors file: names, dtypes as safetensors writes them ("F32",
    "BF16", "F16"), shapes and raw little-endian bytes. The file is mapped, not read into memory.

    Format: 8 bytes little-endian header length, JSON header, data (huggingface.co/docs/safetensors).

    Raises:
        MalformedError: not a safetensors file.
        StoreError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="np"):  # checks the header: lengths, offsets, no holes, no overlaps
            pass
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            header.pop("__metadata__", None)
            with memoryview(data) as view:
                return _digest(header, view, start)
    except SafetensorError as error:
        raise MalformedError(f"file {path} is not a whole safetensors file: {error}") from error
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error}") from error


def _digest(header: dict[str, dict], view: memoryview, start: int) -> str:
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), view[start + begin : start + end])
    try:
        return params_digest(tensors)
    finally:
        for _, _, raw in tensors.values():
            raw.release()
