"""What the service, the nursery and the workers say to each other: msgpack, each message behind its length.

service --Share, Fork (with a socket), Kill--> nursery --Ready, Shared, Forked, Exited--> service
service --Prepare, Score--> worker --Reply--> service
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

_LENGTH = struct.Struct(">I")


class Prepare(msgspec.Struct, tag="prepare", array_like=True, frozen=True):
    """Load rule `rule`; answered by a Reply. `is_batch`: the function takes a list of items."""

    number: int
    rule: int
    function: str
    params_json: str
    prepare: str | None
    is_batch: bool = False


class ItemMessage(msgspec.Struct, array_like=True, frozen=True):
    """An item on its way to a worker."""

    prompt: str
    response: str
    data_json: str
    finish_reason: str
    response_tokens: list[int] | None


class Score(msgspec.Struct, tag="score", array_like=True, frozen=True):
    """Apply rule `rule` to items; answered by a Reply with an outcome for each, in order."""

    number: int
    rule: int
    items: list[ItemMessage]


class OutcomeMessage(msgspec.Struct, array_like=True, frozen=True):
    """A score, or a reason and a detail."""

    score: float | None = None
    reason: str | None = None
    detail: str = ""


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """What became of the Prepare (one outcome, whose reason is None when it went well) or Score with this number.

    `cpu_s` is the CPU time of the worker since it was forked.
    """

    number: int
    outcomes: list[OutcomeMessage]
    cpu_s: float = 0.0


class Share(msgspec.Struct, tag="share", array_like=True, frozen=True):
    """Prepare a rule in the nursery itself, for all workers that are forked from now on."""

    rule: int
    function: str
    params_json: str
    prepare: str | None


class Fork(msgspec.Struct, tag="fork", array_like=True, frozen=True):
    """Fork a worker; its socket comes with this message."""

    worker: int


class Kill(msgspec.Struct, tag="kill", array_like=True, frozen=True):
    """Kill a worker with its whole process group."""

    worker: int


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The nursery takes messages."""


class Shared(msgspec.Struct, tag="shared", array_like=True, frozen=True):
    """A rule was prepared in the nursery, or why not."""

    rule: int
    error: str | None


class Forked(msgspec.Struct, tag="forked", array_like=True, frozen=True):
    """A worker was forked, and has this process id."""

    worker: int
    pid: int


class Exited(msgspec.Struct, tag="exited", array_like=True, frozen=True):
    """A worker is gone with its process group; the code is negative for a signal, None if it was never forked."""

    worker: int
    code: int | None


ToNursery = Share | Fork | Kill
FromNursery = Ready | Shared | Forked | Exited
ToWorker = Prepare | Score


def encode(message: msgspec.Struct) -> bytes:
    """One message as bytes."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now, in order."""
        self._rest += data
        at = 0
        try:
            while len(self._rest) - at >= _LENGTH.size:
                end = at + _LENGTH.size + _LENGTH.unpack_from(self._rest, at)[0]
                if len(self._rest) < end:
                    return
                body, at = bytes(self._rest[at + _LENGTH.size : end]), end
                yield body
        finally:
            del self._rest[:at]
