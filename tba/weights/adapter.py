"""Merge a LoRA adapter (arXiv 2106.09685) into the starting model, which gives the tensors of a version.

    W' = round(W + scale * B A)      W [out, in], A [rank, in], B [out, rank]; in the dtype of W

An adapter is a safetensors file as peft writes it: `base_model.model.<layer>.lora_A.weight` and `.lora_B.weight`, in
float32. The trainer publishes the digests of W', so every machine must compute the same bits, whatever its processor,
BLAS and number of threads. Sums in floating point usually depend on their order, but not here. First, A and scale * B
are rounded to multiples of a power of two, 24 bits below the largest element at rank 16. Every product, and every sum
of `rank` products, is then a whole number below 2^53 times another power of two. float64 holds those exactly, in any
order of summation. The sum with W and the last rounding are elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from tba.errors import MalformedError
from tba.weights.digest import RawTensor, bytes_of, in_parallel, open_tensors
from tba.wire.weight_manifest import Adapter, Manifest, TensorEntry

PEFT_PREFIX = "base_model.model."
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
BLOCK_PRODUCTS = 2**18
"""Multiplications per block of rows: so few that a core's cache holds the block, and OpenBLAS starts no threads."""
MIN_BLOCK_ROWS = 8
"""Fewest rows of a block, even if it exceeds `BLOCK_PRODUCTS` (high ranks): with fewer rows, reading A dominates."""
_FLOAT64_BITS = 53
"""float64 holds whole numbers up to 2^53."""
_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter that is to be published."""

    path: Path
    rank: int
    alpha: int
    fan_in_fan_out: bool
    """As in `Adapter`."""


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """The two factors of the matrix that is added to one weight [rows, columns]; their product is exact in float64."""

    left: NDArray[np.float64]  # [rows, rank]
    right: NDArray[np.float64]  # [rank, columns]


def read_adapter(adapter: Adapter, path: Path, weights: Mapping[str, RawTensor]) -> dict[str, LayerAdapter]:
    """Read an adapter file: for each weight that it changes, the two matrices, rounded so that products are exact.

    Args:
        weights: tensors of the starting model, by name.

    Returns:
        Name of the weight -> its adapter.

    Raises:
        MalformedError: the file holds anything but pairs of finite float32 matrices that fit the weights.
        StoreError: the file cannot be read.
    """
    tensors = open_tensors([path])
    if odd := sorted(name for name in tensors if not name.endswith((A_SUFFIX, B_SUFFIX))):
        raise MalformedError(f"adapter {path.name} holds {odd[0]!r}, which is no part of a LoRA adapter")
    found = {}
    for layer in dict.fromkeys(name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in tensors):
        weight = f"{layer.removeprefix(PEFT_PREFIX)}.weight"
        if weight not in weights or not layer.startswith(PEFT_PREFIX):
            raise MalformedError(f"adapter {path.name} is for {layer!r}, no layer of the starting model")
        matrices = []
        for name in (layer + A_SUFFIX, layer + B_SUFFIX):
            if name not in tensors:
                raise MalformedError(f"adapter {path.name} lacks {name!r}")
            dtype, shape, raw = tensors[name]
            if dtype != "F32" or len(shape) != 2 or not all(shape):
                problem = f"{name!r} is {dtype} {list(shape)}; it must be a matrix in F32"
                raise MalformedError(f"adapter {path.name}: {problem}")
            matrices.append(raw.view("<f4").reshape(shape))
            if not np.isfinite(matrices[-1]).all():
                raise MalformedError(f"adapter {path.name}: {name!r} holds values that are not finite")
        a, b = matrices
        dtype, shape, _ = weights[weight]
        wanted = shape[::-1] if adapter.fan_in_fan_out else shape
        if dtype not in _DTYPES or not a.shape[0] == b.shape[1] == adapter.rank or (len(b), a.shape[1]) != wanted:
            raise MalformedError(
                f"adapter {path.name} has matrices {list(b.shape)} and {list(a.shape)} for {weight!r}, which is "
                f"{dtype} {list(shape)}, at rank {adapter.rank}"
            )
        num_bits = exact_bits(adapter.rank)
        a, b = _on_grid(a.astype(np.float64), num_bits), _on_grid(b * np.float64(adapter.scale), num_bits)
        found[weight] = LayerAdapter(a.T, b.T) if adapter.fan_in_fan_out else LayerAdapter(b, a)
    return found


def exact_bits(rank: int) -> int:
    """Return the most bits that an element of either matrix may have for sums of `rank` products to be exact."""
    return (_FLOAT64_BITS - (rank - 1).bit_length()) // 2


def _on_grid(matrix: NDArray[np.float64], num_bits: int) -> NDArray[np.float64]:
    """Round a matrix to whole multiples, of at most `num_bits` bits, of one power of two for all elements."""
    exponent = int(np.frexp(np.abs(matrix).max())[1]) - num_bits
    return np.ldexp(np.rint(np.ldexp(matrix, -exponent)), exponent)


def merged_blocks(weight: RawTensor, adapter: LayerAdapter) -> Iterator[NDArray[np.uint8]]:
    """Yield the raw bytes of the merged weight, a block of rows at a time; they are the same on every machine."""
    dtype, shape, raw = weight
    rows, columns = shape
    bits = raw.view("<u4" if dtype == "F32" else "<u2").reshape(rows, columns)
    step = max(MIN_BLOCK_ROWS, BLOCK_PRODUCTS // adapter.right.size)
    for first in range(0, rows, step):
        total = adapter.left[first : first + step] @ adapter.right
        # a BLAS may give either zero where all products are zero: without -0.0 in the weight the sum is the same
        total += _as_float(bits[first : first + step], dtype) + np.float32(0)
        with np.errstate(over="ignore"):  # beyond the dtype is infinity, as in every cast
            yield _rounded(total.astype(np.float32), dtype).reshape(-1).view(np.uint8)


def _as_float(bits: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.floating]:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float32 if dtype == "F32" else np.float16)


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Return float32 values in a dtype, rounded to nearest even."""
    if dtype != "BF16":
        return values.astype(np.float32 if dtype == "F32" else np.float16, copy=False)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    is_nan = np.isnan(values)
    return np.where(is_nan, np.uint16(0x7FC0), rounded) if is_nan.any() else rounded


def merge_into(weight: RawTensor, adapter: LayerAdapter, out: NDArray[np.uint8]) -> None:
    """Write the raw bytes of the merged weight into `out`."""
    begin = 0
    for block in merged_blocks(weight, adapter):
        out[begin : begin + block.nbytes] = block
        begin += block.nbytes


def merged_table(base: Manifest, weights: Mapping[str, RawTensor], adapter: Adapter, path: Path) -> list[TensorEntry]:
    """Merge an adapter into the starting model block by block, hash the tensors, and return their manifest entries.

    Args:
        base: manifest of the starting model.
        weights: tensors of the starting model, by name.
        path: the file of the adapter.

    Raises:
        MalformedError, StoreError: as `read_adapter`.
    """
    layers = read_adapter(adapter, path, weights)

    def entry_of(entry: TensorEntry) -> TensorEntry:
        if entry.name not in layers:
            return entry
        digest = xxh3_128()
        for block in merged_blocks(weights[entry.name], layers[entry.name]):
            digest.update(block.data)
        return entry.model_copy(update={"digest": digest.hexdigest()})

    return in_parallel(entry_of, base.tensors, size_bytes=bytes_of(weights.values()))
