"""What lies in the objects of a snapshot.

A rollouts object is rollout documents one after the other. The live table says which of them count: a rollout that was
evicted while the snapshot was written is in no row, one that was scored again is in the row of its newest copy.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.errors import MalformedError
from tba.wire.codec import Document, pack, unpack

SCHEMA = 1
OBJECT_BYTES = 8 << 20
"""A rollouts or prompts object is closed once it is this large."""
ROWS_PER_TABLE = 1_000_000
PLACE_DTYPE = np.dtype([("position", "<u8"), ("object", "<u4"), ("offset", "<u4"), ("num_bytes", "<u4")])
"""Where a rollout lies: its position in the log, number of the object, offset and size in it. 20 bytes."""


class _LiveDocument(Document):
    schema: Literal[1]
    rows: bytes


_DECODER = msgspec.msgpack.Decoder(_LiveDocument)


def encode_places(places: NDArray[np.void]) -> bytes:
    """A piece of the live table."""
    return pack({"schema": SCHEMA, "rows": places.tobytes()})


def decode_places(data: bytes) -> NDArray[np.void]:
    """Read a piece of the live table.

    Raises:
        MalformedError, SchemaVersionError, LimitError: it is not one.
    """
    rows = unpack(data, _DECODER, what="live table", schema=SCHEMA).rows
    if len(rows) % PLACE_DTYPE.itemsize:
        raise MalformedError(f"live table: {len(rows)} bytes are not rows of {PLACE_DTYPE.itemsize}")
    return np.frombuffer(rows, dtype=PLACE_DTYPE)
