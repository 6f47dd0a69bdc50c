"""The codec of weight deltas: lossless for every bit pattern, and MalformedError alone for bytes of a stranger."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tba.errors import MalformedError
from tba.weights.delta import DENSE, SEGMENT_ELEMENTS, SPARSE, WHOLE, apply_tensor, encode_tensor

WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "F8_E4M3": 1, "BOOL": 1}
Raw = NDArray[np.uint8]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, Raw, Raw]:
    """A dtype, a tensor, and one in which a share of the elements differs: by small steps or by any bits."""
    dtype, rng = draw(st.sampled_from(list(WIDTHS))), np.random.default_rng(draw(st.integers(0, 2**32)))
    width = WIDTHS[dtype]
    size = draw(st.sampled_from([0, 1, 7, 255, 256, 600, 5_000]))
    # bits at random: NaNs with payloads, infinities, denormals and both zeros are among those of 16 bits
    old = rng.integers(0, 256, (size, width), dtype=np.uint8)
    density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.49, 0.51, 1.0]))
    changed = rng.random(size) < density
    new = old.copy()
    if draw(st.booleans()):
        new[changed, 0] += draw(st.integers(1, 255))
    else:
        new[changed] = rng.integers(0, 256, (int(changed.sum()), width), dtype=np.uint8)
    odd = draw(st.sampled_from([0, 0, 1]))  # bytes that are no whole element
    return dtype, old.reshape(-1)[odd:].copy(), new.reshape(-1)[odd:].copy()


def decoded(encoded: bytes, base: Raw | None, size: int, dtype: str) -> Raw:
    """Apply to fresh memory that holds other bytes."""
    out = np.full(size, 0xA5, np.uint8)
    apply_tensor(encoded, base, out, dtype)
    return out


@given(tensors())
@settings(max_examples=150, deadline=None)
def test_every_bit_comes_back(case: tuple[str, Raw, Raw]) -> None:
    dtype, old, new = case
    encoded = encode_tensor(old, new, dtype)
    if encoded is None:
        assert old.tobytes() == new.tobytes()
    else:
        assert old.tobytes() != new.tobytes()
        assert decoded(encoded, old, len(new), dtype).tobytes() == new.tobytes()
        in_place = old.copy()
        apply_tensor(encoded, in_place, in_place, dtype)
        assert in_place.tobytes() == new.tobytes()
    for other in (None, np.append(old, np.uint8(0))):
        whole = encode_tensor(other, new, dtype)
        assert whole is not None
        assert decoded(whole, other, len(new), dtype).tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_float_steps_to_every_kind_of_float(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for number in (0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7C00, 0x7FC1, 0xFFFF, 0x3F80):
        new = np.full_like(every, number).view(np.uint8)
        encoded = encode_tensor(every.view(np.uint8), new, dtype)
        assert encoded is not None
        assert decoded(encoded, every.view(np.uint8), len(new), dtype).tobytes() == new.tobytes()


def test_several_segments_of_different_density_are_small() -> None:
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(3 * SEGMENT_ELEMENTS + 11).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()  # the second segment stays
    new[[0, SEGMENT_ELEMENTS - 1]] += np.uint16(1)  # far apart
    new[2 * SEGMENT_ELEMENTS : 3 * SEGMENT_ELEMENTS] += (rng.random(SEGMENT_ELEMENTS) < 0.55).astype(np.uint16)  # dense
    last = rng.random(11) < 0.2
    last[-1] = True
    new[-11:][last] -= np.uint16(1)
    encoded = encode_tensor(old.view(np.uint8), new.view(np.uint8), "BF16")
    assert encoded is not None
    assert encoded[0] == SPARSE
    assert decoded(encoded, old.view(np.uint8), new.nbytes, "BF16").tobytes() == new.tobytes()
    # the third has H(0.55) + 0.55 = 1.543 bits of entropy for each element: up or down is by chance
    assert len(encoded) < 1.543 * SEGMENT_ELEMENTS / 8 * 1.01


# ---- Bytes from a stranger ------------------------------------------------------------------------------------------


def framed(codec: int, *streams: bytes) -> bytes:
    """A segment as the encoder writes it, around any streams."""
    frames = [zstandard.compress(stream, 1) for stream in streams]
    return bytes([codec]) + b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


STREAMING = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 4)
BAD = {
    "empty": b"",
    "unknown codec": b"\x04",
    "a frame that is not there": bytes([SPARSE]),
    "a frame that ends early": bytes([SPARSE]) + (100).to_bytes(4, "little") + b"abc",
    "no zstd": bytes([SPARSE]) + (3).to_bytes(4, "little") + b"abc",
    "size not stated": bytes([SPARSE]) + len(STREAMING).to_bytes(4, "little") + STREAMING,
    "position out of range": framed(SPARSE, b"\x64", b"\1", b"\0"),
    "positions that skip out of range": framed(SPARSE, b"\xff\x00", b"\1", b"\0"),
    "more gaps than elements": framed(SPARSE, bytes(101), bytes(101), bytes(101)),
    "fewer steps than gaps": framed(SPARSE, b"\0\0", b"\1", b"\0"),
    "more steps than gaps": framed(SPARSE, b"\0", b"\1\1", b"\0\0"),
    "planes of two lengths": framed(DENSE, bytes(100), bytes(99)),
    "short whole": framed(WHOLE, bytes(99), bytes(99)),
    "bytes at the end": framed(SPARSE, b"\0", b"\1", b"\0") + b"\0",
    "bomb": framed(SPARSE, bytes(1 << 28), b"\1", b"\0"),
}


@pytest.mark.parametrize("what", BAD)
def test_malformed_bytes_are_refused(what: str) -> None:
    base = np.zeros(200, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError, match="delta of a tensor"):
            decoded(BAD[what], base, 200, "BF16")
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_steps_without_the_base_are_refused() -> None:
    old, new = np.zeros(200, np.uint8), np.arange(200, dtype=np.uint8)
    for changed in (new, np.where(new < 2, new, 0).astype(np.uint8)):
        encoded = encode_tensor(old, changed, "BF16")
        assert encoded is not None
        for base in (None, np.zeros(100, np.uint8)):
            with pytest.raises(MalformedError, match="needs the tensor"):
                decoded(encoded, base, 200, "BF16")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_raises_nothing_but_malformed(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, 4_000, dtype=np.uint8)
    new = old.copy()
    new[rng.random(4_000) < data.draw(st.sampled_from([0.01, 0.1, 0.9]))] ^= 1
    base = data.draw(st.sampled_from([old, None]))
    encoded = bytearray(encode_tensor(base, new, "BF16") or b"")
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    del encoded[data.draw(st.integers(0, len(encoded))) :]
    with contextlib.suppress(MalformedError):
        decoded(bytes(encoded), base, len(new), "BF16")


def test_memory_is_bounded_by_the_segment() -> None:
    """Encoding and applying a large tensor takes no copy of it: some 20 bytes for each element of a segment."""
    old = np.zeros(16 * SEGMENT_ELEMENTS, np.uint8)
    new = old.copy()
    new[::5] += 1
    out = np.empty_like(old)
    tracemalloc.start()
    try:
        encoded = encode_tensor(old, new, "U8")
        assert encoded is not None
        apply_tensor(encoded, old, out, "U8")
        assert tracemalloc.get_traced_memory()[1] < 24 * SEGMENT_ELEMENTS + len(encoded)
    finally:
        tracemalloc.stop()
    assert out.tobytes() == new.tobytes()
