"""Digests of files, and of the parameters inside a safetensors file, without torch."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tba.errors import MalformedError, StoreError
from tba.wire.weight_manifest import params_digest


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
