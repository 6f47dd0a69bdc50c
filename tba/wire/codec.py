"""msgpack with schema checks: the one way in and out for bytes on the wire.

Documents are maps with a `schema` number and exactly the fields that the schema names. Numeric arrays travel as raw
little-endian bytes (int32 token ids, float32 log-probabilities): a 1,000-token rollout is about 8 KB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from tba.errors import LimitError, MalformedError, SchemaVersionError

T = TypeVar("T")

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_NAME_CHARS = 256


def pack(document: Mapping[str, Any]) -> bytes:
    """Encode a map of str, bytes, numbers, lists and maps."""
    packed = msgpack.packb(document, use_bin_type=True)
    assert packed is not None  # only a stream packer returns None
    return packed


def unpack(data: bytes, *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """Decode one msgpack map with string keys and nothing after it.

    Raises:
        LimitError: more than `max_bytes`.
        MalformedError: not msgpack, or not a map.
    """
    if len(data) > max_bytes:
        raise LimitError(f"{what}: {len(data)} bytes exceed the limit of {max_bytes}; send smaller requests")
    try:
        document = msgpack.unpackb(data, raw=False, strict_map_key=True)  # sizes inside are bounded by len(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"{what}: the body is not one valid msgpack document ({error})") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise MalformedError(f"{what}: expected a msgpack map with string keys, got {type(document).__name__}")
    return document


def int32_bytes(values: NDArray[np.integer]) -> bytes:
    """Raw little-endian int32."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def float32_bytes(values: NDArray[np.floating]) -> bytes:
    """Raw little-endian float32."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


class Reader:
    """Takes typed fields out of a decoded map; what is missing, mistyped or left over is an error that names it."""

    def __init__(self, document: Mapping[str, Any], *, what: str) -> None:
        self._left = dict(document)
        self.what = what

    def schema(self, *known: int) -> int:
        """Take `schema` and refuse versions that this build does not read."""
        version = self.integer("schema", 0, 1_000_000)
        if version not in known:
            raise SchemaVersionError(
                f"{self.what}: schema {version} is not one this build reads {list(known)}; "
                "run the same tba release on every service"
            )
        return version

    def take(self, name: str, kind: type[T]) -> T:
        """Take a required field of exactly this type."""
        if name not in self._left:
            raise MalformedError(f"{self.what}: field {name!r} is missing")
        value = self._left.pop(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MalformedError(
                f"{self.what}: field {name!r} must be {kind.__name__}, got {type(value).__name__} ({_short(value)})"
            )
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        """Take a field that must be present but may be nil."""
        if name in self._left and self._left[name] is None:
            self._left.pop(name)
            return None
        return self.take(name, kind)

    def integer(self, name: str, low: int, high: int) -> int:
        """Take a whole number in [low, high]."""
        value = self.take(name, int)
        if not low <= value <= high:
            raise MalformedError(f"{self.what}: field {name!r} is {value}, outside [{low}, {high}]")
        return value

    def number(self, name: str) -> float:
        """Take a finite number."""
        if isinstance(self._left.get(name), int) and not isinstance(self._left.get(name), bool):
            return float(self.take(name, int))
        value = self.take(name, float)
        if not math.isfinite(value):
            raise MalformedError(f"{self.what}: field {name!r} is {value}, not a finite number")
        return value

    def optional_number(self, name: str) -> float | None:
        """Take a finite number or nil."""
        if name in self._left and self._left[name] is None:
            self._left.pop(name)
            return None
        return self.number(name)

    def name(self, name: str, *, max_chars: int = MAX_NAME_CHARS) -> str:
        """Take a short, non-empty string."""
        value = self.take(name, str)
        if not value:
            raise MalformedError(f"{self.what}: field {name!r} is empty")
        if len(value) > max_chars:
            raise LimitError(f"{self.what}: field {name!r} has {len(value)} characters, the limit is {max_chars}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Take a string that is one of `choices`."""
        value = self.take(name, str)
        if value not in choices:
            raise MalformedError(f"{self.what}: field {name!r} is {value!r}, not one of {', '.join(choices)}")
        return value

    def int32_array(self, name: str, *, max_items: int) -> NDArray[np.int32]:
        """Take raw little-endian int32."""
        return self._array(name, "<i4", max_items).astype(np.int32, copy=False)

    def float32_array(self, name: str, *, max_items: int) -> NDArray[np.float32]:
        """Take raw little-endian float32, all finite."""
        values = self._array(name, "<f4", max_items).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise MalformedError(f"{self.what}: field {name!r} holds a value that is not finite")
        return values

    def _array(self, name: str, dtype: str, max_items: int) -> NDArray[Any]:
        raw = self.take(name, bytes)
        if len(raw) % 4:
            raise MalformedError(f"{self.what}: field {name!r} has {len(raw)} bytes, not a multiple of 4")
        if len(raw) // 4 > max_items:
            raise LimitError(f"{self.what}: field {name!r} has {len(raw) // 4} items, the limit is {max_items}")
        return np.frombuffer(raw, dtype=dtype)

    def done(self) -> None:
        """Refuse fields that the schema does not name."""
        if self._left:
            raise MalformedError(f"{self.what}: unknown field(s) {', '.join(sorted(self._left))}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
