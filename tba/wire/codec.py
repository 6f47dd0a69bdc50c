"""Encode and decode msgpack documents with schema checks, and make the ids that clients choose.

A document is a map with a `schema` number and exactly the fields of that schema. Numeric arrays are raw little-endian
bytes (int32 token ids, float32 log-probs): a rollout of 1,000 tokens is about 8 KB. msgspec checks fields, types,
lengths and ranges while it decodes (ADR 5).

Clients make ids themselves, so that a service recognises a retry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike

from tba.errors import LimitError, MalformedError, SchemaVersionError, WireError


def new_rollout_id() -> bytes:
    """Return a unique id of 16 bytes in UUIDv7 layout (RFC 9562, section 5.7), ordered by time of creation."""
    milliseconds = time.time_ns() // 1_000_000
    raw = bytearray(milliseconds.to_bytes(6, "big") + os.urandom(10))
    # version 7 and the variant of RFC 9562: other tools read the time out of such an id
    raw[6] = (raw[6] & 0x0F) | 0x70
    raw[8] = (raw[8] & 0x3F) | 0x80
    return bytes(raw)


def new_id(prefix: str) -> str:
    """Return a short readable id, for example `lease-01928c3f5a7b7c31`."""
    return f"{prefix}-{new_rollout_id().hex()[:20]}"


T = TypeVar("T")

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_NAME_CHARS = 256
MAX_PROBLEM_CHARS = 300

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
"""A text of 1 to MAX_NAME_CHARS characters."""


class Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """Base of documents on the wire: a map with exactly the fields of its class, of exactly their types."""


class NoSchema(Document, frozen=True, tag_field="schema", tag=0):
    """Never sent. Decoders take it as an alternative, because msgspec requires a `schema` field only in a union."""


# made once: to make one costs more than to encode a small document
_encoder = msgspec.msgpack.Encoder()


def pack(document: Document | Mapping[str, Any]) -> bytes:
    """Encode a document, or a map of str, bytes, numbers, lists and maps, as msgpack."""
    return _encoder.encode(document)


def unpack(
    data: bytes, decoder: msgspec.msgpack.Decoder[T], *, what: str, schema: int, max_bytes: int = MAX_DOCUMENT_BYTES
) -> T:
    """Decode and validate one document; bytes after it are an error.

    Args:
        data: msgpack bytes.
        decoder: decoder of the document's class.
        what: name of the document, for errors.
        schema: the schema number that this build reads.
        max_bytes: larger documents are refused.

    Raises:
        LimitError, SchemaVersionError, MalformedError: the message names the field.
    """
    # before decoding, which may need many times the size of the bytes
    if len(data) > max_bytes:
        raise LimitError(f"{what}: {len(data)} bytes exceed the limit of {max_bytes}; send smaller requests")
    try:
        found = decoder.decode(data)
    except (ValueError, MemoryError, RecursionError) as error:  # all that the decoder raises for hostile bytes
        raise _refusal(data, str(error), what=what, schema=schema) from None
    if isinstance(found, NoSchema):
        raise _refusal(data, "no schema", what=what, schema=schema)
    return found


def _refusal(data: bytes, problem: str, *, what: str, schema: int) -> WireError:
    """Return the error for bytes that a decoder refused, from msgspec's message about the wrong field."""
    try:
        document: Any = msgspec.msgpack.decode(data)
    except (ValueError, TypeError, MemoryError, RecursionError) as reason:  # TypeError: a key that cannot be hashed
        return MalformedError(f"{what}: the body is not one valid msgpack document ({reason})")
    if isinstance(document, dict):
        # before the fields: another schema number explains every field that differs
        found = document.get("schema")
        if type(found) is int and found != schema:
            return SchemaVersionError(
                f"{what}: schema {found} is not one this build reads ({schema}); run the same tba release on every "
                "service"
            )
        rollout_id = document.get("rollout_id")
        # one push holds many rollouts: the id tells the sender which one
        if isinstance(rollout_id, bytes) and len(rollout_id) == 16:
            what = f"{what} {rollout_id.hex()}"
    kind = LimitError if "of length <=" in problem else MalformedError
    return kind(f"{what}: {problem[:MAX_PROBLEM_CHARS]}")


def int32_bytes(values: ArrayLike) -> bytes:
    """Return the values as raw little-endian int32."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def float32_bytes(values: ArrayLike) -> bytes:
    """Return the values as raw little-endian float32."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()
