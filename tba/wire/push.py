"""The push: encoded rollouts of one request, each kept as its own bytes so that the buffer stores what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tba.errors import LimitError, WireError
from tba.wire.codec import Document, pack, unpack
from tba.wire.document import RolloutDocument, check_numbers, numbers_hold, read_document

SCHEMA = 1
MAX_ROLLOUTS_PER_PUSH = 512


class _PushDocument(Document):
    schema: Literal[1]
    rollouts: Annotated[list[bytes], Meta(max_length=MAX_ROLLOUTS_PER_PUSH)]


_DECODER = msgspec.msgpack.Decoder(_PushDocument)


def encode_push(payloads: Sequence[bytes]) -> bytes:
    """The body of one push."""
    return pack({"schema": SCHEMA, "rollouts": list(payloads)})


def decode_push(data: bytes, *, max_bytes: int) -> list[bytes]:
    """The encoded rollouts of one push; each still has to be checked, so that one bad item cannot hide the others.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    payloads = unpack(data, _DECODER, what="push", schema=SCHEMA, max_bytes=max_bytes).rollouts
    if not payloads:
        raise LimitError(f"push: 0 rollouts; a push holds 1 to {MAX_ROLLOUTS_PER_PUSH}")
    return payloads


def check_push(payloads: Sequence[bytes]) -> list[RolloutDocument | WireError]:
    """Per item the rollout, or why it is refused: exactly what `decode_rollout` accepts, without building arrays."""
    items: list[RolloutDocument | WireError] = []
    for payload in payloads:
        try:
            items.append(read_document(payload))
        except WireError as error:
            items.append(error)
    documents = [item for item in items if isinstance(item, RolloutDocument)]
    if documents and not numbers_hold(documents):
        for at, item in enumerate(items):
            if isinstance(item, RolloutDocument):
                try:
                    check_numbers(item)
                except WireError as error:
                    items[at] = error
    return items
