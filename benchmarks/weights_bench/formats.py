"""Ways to say what changed from one state of bfloat16 weights to the next: sizes, speeds, and a floor of sizes."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from benchmarks.weights_bench.training import State
from tba.weights.delta import apply_tensor, encode_tensor, ordered

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Format:
    """One way; both directions work on one tensor, flat."""

    encode: Callable[[Bits, Bits], Any]
    decode: Callable[[Any, Bits, Bits], None]
    """Encoded, base, where the new tensor is written."""
    size_bytes: Callable[[Any], int]


def _encode_index_value(old: Bits, new: Bits) -> tuple[NDArray[np.int32], Bits]:
    index = np.flatnonzero(old != new).astype(np.int32)
    return index, new[index]


def _decode_index_value(encoded: tuple[NDArray[np.int32], Bits], base: Bits, out: Bits) -> None:
    out[:] = base
    out[encoded[0]] = encoded[1]


def _decode_xor(encoded: bytes, base: Bits, out: Bits) -> None:
    np.bitwise_xor(base, np.frombuffer(zstandard.decompress(encoded), np.uint16), out=out)


def _decode_ours(encoded: bytes | None, base: Bits, out: Bits) -> None:
    if encoded is None:
        out[:] = base
    else:
        apply_tensor(encoded, base.view(np.uint8), out.view(np.uint8), "BF16")


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "index+value": Format(
            _encode_index_value, _decode_index_value, lambda encoded: encoded[0].nbytes + encoded[1].nbytes
        ),
        "xor+zstd": Format(lambda old, new: zstandard.compress((old ^ new).data, 1), _decode_xor, len),
        "tba": Format(
            lambda old, new: encode_tensor(old.view(np.uint8), new.view(np.uint8), "BF16"),
            _decode_ours,
            lambda encoded: 0 if encoded is None else len(encoded),
        ),
    }
)
"""int32 positions and raw values without compression; XOR of whole tensors and zstd level 1; tba/weights/delta.py."""


def sizes(old: State, new: State) -> dict[str, float]:
    """Bytes of every format, of all elements (`full`), and the floor; how many elements changed, and by one step."""
    found: dict[str, float] = {"full": 0.0, **dict.fromkeys(FORMATS, 0.0)}
    num_changed = num_single = 0
    for a, b in _pairs(old, new):
        found["full"] += a.nbytes
        steps = np.abs(ordered(b).astype(np.int32) - ordered(a))
        num_changed += int(np.count_nonzero(steps))
        num_single += int(np.count_nonzero(steps == 1))
        for name, each in FORMATS.items():
            found[name] += each.size_bytes(each.encode(a, b))
    found["floor"] = _floor_bytes(old, new)
    found["changed_share"] = num_changed / (found["full"] / 2)
    found["single_step_share"] = num_single / max(1, num_changed)
    return found


def _floor_bytes(old: State, new: State) -> float:
    """Order-0 entropy: whether an element changed, given the exponent it had; by how many steps those did that changed.

    It is no bound for a coder that knows more, for example in which row an element is.
    """
    num_by_exponent, num_changed = np.zeros((2, 256))
    steps = []
    for a, b in _pairs(old, new):
        exponents, changed = (a >> 7) & 255, a != b
        num_by_exponent += np.bincount(exponents, minlength=256)
        num_changed += np.bincount(exponents[changed], minlength=256)
        steps.append(ordered(b[changed]).astype(np.int32) - ordered(a[changed]))
    share = num_changed / np.maximum(num_by_exponent, 1)
    step_shares = np.unique_counts(np.concatenate(steps)).counts / max(1.0, num_changed.sum())
    bits = float(num_by_exponent @ (_bits(share) + _bits(1 - share))) + num_changed.sum() * _bits(step_shares).sum()
    return bits / 8


def _bits(share: NDArray[np.float64]) -> NDArray[np.float64]:
    return -share * np.log2(np.where(share > 0, share, 1))


def speeds(old: State, new: State, num_rounds: int) -> dict[str, dict[str, float]]:
    """MB of tensors per second of CPU time, one thread: `encode` and `decode` of every format, medians of rounds.

    Decoding makes a whole new tensor, the copy of the base included. Formats alternate.

    Raises:
        SystemExit: a format does not give the same bits back.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {"encode": [], "decode": []} for name in FORMATS}
    total_mb = sum(bits.nbytes for bits in new.values()) / 1e6
    outs = {name: np.empty(bits.size, np.uint16) for name, bits in new.items()}
    for _ in range(num_rounds):
        for name, each in FORMATS.items():
            for out in outs.values():
                out.fill(0)
            start = time.process_time()
            encoded = [each.encode(a, b) for a, b in _pairs(old, new)]
            middle = time.process_time()
            for code, (a, _), out in zip(encoded, _pairs(old, new), outs.values(), strict=True):
                each.decode(code, a, out)
            end = time.process_time()
            seconds[name]["encode"].append(middle - start)
            seconds[name]["decode"].append(end - middle)
            if not all(np.array_equal(b, out) for (_, b), out in zip(_pairs(old, new), outs.values(), strict=True)):
                raise SystemExit(f"the format {name} gives other bits back")
    return {
        name: {what: total_mb / statistics.median(values) for what, values in both.items()}
        for name, both in seconds.items()
    }


def digest_speeds(state: State, num_rounds: int) -> dict[str, float]:
    """MB per second of CPU time, one thread, a digest for each tensor."""
    found = {}
    total_mb = sum(bits.nbytes for bits in state.values()) / 1e6
    for name, digest in {"xxh3-128": xxh3_128_digest, "sha256": lambda data: hashlib.sha256(data).digest()}.items():
        seconds = []
        for _ in range(num_rounds):
            start = time.process_time()
            for bits in state.values():
                digest(bits.data)
            seconds.append(time.process_time() - start)
        found[name] = total_mb / statistics.median(seconds)
    return found


def _pairs(old: State, new: State) -> list[tuple[Bits, Bits]]:
    return [(bits.reshape(-1), new[name].reshape(-1)) for name, bits in old.items()]
