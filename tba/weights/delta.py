"""Encode the changes of a tensor between two versions: lossless, small where few elements changed, fast both ways.

An optimizer step at a low learning rate moves few bfloat16 elements, and most of those by one unit in the last place
(arXiv 2602.03839). So two numbers code a changed element: the distance to the changed element before it, and its step.
The step is new minus old, after the bits of floats are mapped to integers that sort like the floats. Both numbers are
small, and zstd's Huffman stage shrinks them. All arithmetic is on integers modulo 2^bits, so it is exact for NaN,
infinities, -0.0 and denormals.

    tensor  = segment*             each of SEGMENT_ELEMENTS elements, the last one shorter
    segment = EQUAL
            | SPARSE gaps numbers  the steps of the elements that changed
            | DENSE numbers        the steps of all elements
            | WHOLE numbers        the elements
    gaps    = frame                a byte per changed element: how many unchanged ones are before it; a byte of 255
                                   stands for 255 unchanged elements, with no changed one behind them
    numbers = frame n frame{n}     first frame: 4 bits per number, two in a byte; 15 means 15 or more. Those numbers
                                   follow in full, as n planes: plane i has byte i of each of them
    frame   = length zstd          4 bytes for the length, then a zstd frame that states the size of its content

The codec of a segment (EQUAL, ...) and `n` take one byte each; all is little-endian. Steps are zigzag-coded (0, -1, 1,
-2, ...). With two small numbers in a byte, a Huffman code can spend less than a bit on one number. This module checks
only that the bytes are well-formed; that the base was the right one is proved by the digest in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tba.errors import MalformedError

Elements = NDArray[Any]
"""The bits of elements, as integers of the same width: unsigned, except those that `ordered` returns."""
SEGMENT_ELEMENTS = 1 << 20
"""Elements of a segment. It bounds memory, to 41 bytes per element in encoding and decoding, and suits CPU caches."""
EQUAL, SPARSE, DENSE, WHOLE = range(4)
MAX_SPARSE_DENSITY = 0.5
"""Above this share of changed elements DENSE is smaller."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LENGTH_BYTES = 4
_HUFFMAN = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)
"""zstd searches little for matches: in noise they are chance. Those that level 1 uses cost time and a sixth in size."""
_SKIP = 255
_LARGE = 15


def encode_tensor(old: NDArray[np.uint8] | None, new: NDArray[np.uint8], dtype: str) -> bytes | None:
    """Encode the changes from `old` to `new`; return None if they are equal.

    Args:
        old: raw little-endian bytes. If it is None, or has another size than `new`, the whole tensor is encoded.
        new: raw little-endian bytes.
        dtype: as safetensors writes it. All but floats of 16 to 64 bits are coded byte by byte.
    """
    compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
    after = _elements(new, dtype)
    if old is None or old.nbytes != new.nbytes:
        return b"".join(bytes([WHOLE]) + _numbers(part, compressor) for part in _segments(after))
    segments: list[bytes] = []
    for before, part in zip(_segments(_elements(old, dtype)), _segments(after), strict=True):
        changed = np.flatnonzero(before != part)
        if len(changed) == 0:
            segments.append(bytes([EQUAL]))
        elif len(changed) > MAX_SPARSE_DENSITY * len(part):
            segments.append(bytes([DENSE]) + _numbers(_steps(before, part, dtype), compressor))
        else:
            numbers = _numbers(_steps(before[changed], part[changed], dtype), compressor)
            segments.append(bytes([SPARSE]) + _frame(_gaps(changed), compressor) + numbers)
    return b"".join(segments) if any(segment[0] != EQUAL for segment in segments) else None


def apply_tensor(
    encoded: bytes | memoryview, base: NDArray[np.uint8] | None, out: NDArray[np.uint8], dtype: str
) -> None:
    """Apply the encoded changes to `base`, and write the new tensor into `out`.

    Args:
        encoded: output of `encode_tensor`; it is not trusted.
        base: the raw bytes of the old tensor; may be `out` itself. None: there was none.
        out: raw bytes, as many as the new tensor has; undefined after an error.
        dtype: as safetensors writes it.

    Raises:
        MalformedError: `encode_tensor` cannot have written this for a tensor of this size and dtype.
    """
    reader = _Reader(encoded)
    after = _elements(out, dtype)
    if base is not None and base is not out and base.nbytes == out.nbytes:
        for old, new in zip(_segments(_elements(base, dtype)), _segments(after), strict=True):
            _apply_segment(reader, old, new, dtype)
    else:
        for new in _segments(after):
            _apply_segment(reader, new if base is out else None, new, dtype)
    reader.require_end()


def _apply_segment(reader: _Reader, base: Elements | None, out: Elements, dtype: str) -> None:
    codec = reader.codec()
    if codec == WHOLE:
        out[:] = reader.numbers(len(out), out.dtype)
        return
    if base is None:
        raise MalformedError(f"delta of a tensor: codec {codec} needs the tensor it was made from, and there is none")
    if codec == DENSE:
        out[:] = _stepped(base, reader.numbers(len(out), out.dtype), dtype)
        return
    if base is not out:
        out[:] = base
    if codec == SPARSE:
        positions = _positions(reader.frame(len(out), exact=False), len(out))
        steps = reader.numbers(len(positions), out.dtype)
        out[positions] = _stepped(out[positions], steps, dtype)


# ---- Elements -------------------------------------------------------------------------------------------------------


def _elements(raw: NDArray[np.uint8], dtype: str) -> Elements:
    width = _FLOAT_BYTES.get(dtype, 1)
    return raw.view(f"<u{width}" if raw.nbytes % width == 0 else np.uint8)


def _segments(elements: Elements) -> Iterator[Elements]:
    return (elements[start : start + SEGMENT_ELEMENTS] for start in range(0, len(elements), SEGMENT_ELEMENTS))


def ordered(elements: Elements) -> Elements:
    """Map the bits of floats to integers that are ordered like the floats; the inverse is the map itself."""
    signed = elements.view(f"<i{elements.itemsize}")
    return signed ^ ((signed >> (8 * elements.itemsize - 1)) & np.iinfo(signed.dtype).max)


def _steps(old: Elements, new: Elements, dtype: str) -> Elements:
    """Return the zigzag-coded steps from `old` to `new`."""
    if dtype in _FLOAT_BYTES:
        steps = ordered(new) - ordered(old)
    else:
        steps = (new - old).view(f"<i{new.itemsize}")
    return ((steps << 1) ^ (steps >> (8 * new.itemsize - 1))).view(new.dtype)


def _stepped(old: Elements, zigzag: Elements, dtype: str) -> Elements:
    """Return `old` moved by zigzag-coded steps: the inverse of `_steps`."""
    steps = (zigzag >> 1) ^ -(zigzag & 1)
    if dtype in _FLOAT_BYTES:
        return ordered(ordered(old).view(old.dtype) + steps).view(old.dtype)
    return old + steps


# ---- Streams --------------------------------------------------------------------------------------------------------


def _gaps(changed: NDArray[np.intp]) -> NDArray[np.uint8]:
    gaps = changed.copy()
    gaps[1:] -= changed[:-1] + 1
    is_long = np.flatnonzero(gaps >= _SKIP)
    num_skips, gaps[is_long] = np.divmod(gaps[is_long], _SKIP)
    return np.insert(gaps.astype(np.uint8), np.repeat(is_long, num_skips), _SKIP)


def _positions(gaps: NDArray[np.uint8], num_elements: int) -> NDArray[np.intp]:
    """Return the positions of the changed elements.

    Raises:
        MalformedError: one of them is outside the segment.
    """
    is_change = gaps != _SKIP
    ends = np.cumsum(gaps + is_change, dtype=np.intp)  # 254 + 1 at most: no byte overflows
    positions = ends[is_change] - 1
    if len(positions) and positions[-1] >= num_elements:
        raise MalformedError(f"delta of a tensor: element {positions[-1]} changed in a segment of {num_elements}")
    return positions


def _numbers(values: Elements, compressor: zstandard.ZstdCompressor) -> bytes:
    small = np.zeros(len(values) + len(values) % 2, np.uint8)
    np.minimum(values, _LARGE, out=small[: len(values)], casting="unsafe")
    large = values[small[: len(values)] == _LARGE]
    num_planes = -(-int(large.max(initial=0)).bit_length() // 8)
    columns = large.view(np.uint8).reshape(-1, values.itemsize)
    planes = [np.ascontiguousarray(columns[:, plane]) for plane in range(num_planes)]
    return b"".join(
        [
            _frame(small[0::2] | small[1::2] << 4, compressor),
            bytes([num_planes]),
            *(_frame(plane, compressor) for plane in planes),
        ]
    )


def _frame(stream: Elements, compressor: zstandard.ZstdCompressor) -> bytes:
    frame = compressor.compress(stream.data)
    return len(frame).to_bytes(_LENGTH_BYTES, "little") + frame


class _Reader:
    """Reads the parts of an encoded tensor in order. Every read may raise MalformedError: the bytes are not trusted."""

    def __init__(self, encoded: bytes | memoryview) -> None:
        self._bytes, self._at = memoryview(encoded).cast("B"), 0
        self._decompressor = zstandard.ZstdDecompressor()

    def codec(self) -> int:
        """Read the codec of the next segment."""
        codec = self._take(1)[0]
        if codec > WHOLE:
            raise MalformedError(f"delta of a tensor: there is no codec {codec} (0 to {WHOLE})")
        return codec

    def frame(self, num_bytes: int, *, exact: bool = True) -> NDArray[np.uint8]:
        """Read and decompress the next frame, which must hold `num_bytes`, or at most that many if not `exact`."""
        frame = self._take(int.from_bytes(self._take(_LENGTH_BYTES), "little"))
        try:
            size_bytes = zstandard.frame_content_size(frame)  # -1: not stated
            # before it is decompressed: zstandard takes as much memory as the frame states
            if not 0 <= size_bytes <= num_bytes or (exact and size_bytes != num_bytes):
                raise MalformedError(f"delta of a tensor: a stream has {size_bytes} bytes, expected {num_bytes}")
            data = self._decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise MalformedError(f"delta of a tensor: a stream cannot be decompressed: {error}") from None
        return np.frombuffer(data, np.uint8)

    def numbers(self, count: int, dtype: np.dtype) -> Elements:
        """Read `count` numbers (format: `numbers` in the description of this module)."""
        pairs = self.frame(-(-count // 2))
        both = np.empty((len(pairs), 2), np.uint8)
        np.bitwise_and(pairs, 15, out=both[:, 0])
        np.right_shift(pairs, 4, out=both[:, 1])
        small = both.reshape(-1)[:count]
        values = small.astype(dtype)
        is_large = np.flatnonzero(small == _LARGE)
        num_planes = self._take(1)[0]
        if num_planes > dtype.itemsize:
            raise MalformedError(f"delta of a tensor: {num_planes} planes of elements of {dtype.itemsize} bytes")
        if num_planes:
            large = np.zeros((len(is_large), dtype.itemsize), np.uint8)
            for plane in range(num_planes):
                large[:, plane] = self.frame(len(is_large))
            values[is_large] = large.reshape(-1).view(dtype)
        return values

    def require_end(self) -> None:
        """Check that no bytes are left."""
        if rest := len(self._bytes) - self._at:
            raise MalformedError(f"delta of a tensor: {rest} bytes after its last segment")

    def _take(self, num_bytes: int) -> memoryview:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._bytes):
            raise MalformedError(f"delta of a tensor: it ends at byte {len(self._bytes)}, expected {self._at} or more")
        return self._bytes[start : self._at]
