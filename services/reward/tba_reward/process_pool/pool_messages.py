"""The messages between the service, the fork server and the workers: msgpack, each one behind its length.

service --PreloadRule, ForkWorker (with a socket), KillWorker--> fork server
service <--ServerReady, RulePreloaded, WorkerForked, WorkerExited-- fork server
service --LoadRule, ScoreItems--> worker --Reply--> service
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

_LENGTH = struct.Struct(">I")


class LoadRule(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Load rule `rule` in a worker; answered by a Reply. `is_batch`: the function takes a list of items."""

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


class ScoreItems(msgspec.Struct, tag="score", array_like=True, frozen=True):
    """Apply rule `rule` to items; answered by a Reply with one outcome per item, in order."""

    number: int
    rule: int
    items: list[ItemMessage]


class OutcomeMessage(msgspec.Struct, array_like=True, frozen=True):
    """A score, or a reason and a detail."""

    score: float | None = None
    reason: str | None = None
    detail: str = ""


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """The outcomes of the LoadRule or ScoreItems with this number.

    A LoadRule has one outcome; its reason is None when the rule was loaded. `cpu_s` is the CPU time of the worker since
    it was forked.
    """

    number: int
    outcomes: list[OutcomeMessage]
    cpu_s: float = 0.0


class PreloadRule(msgspec.Struct, tag="preload", array_like=True, frozen=True):
    """Load a rule in the fork server itself, for all workers that are forked from now on."""

    rule: int
    function: str
    params_json: str
    prepare: str | None


class ForkWorker(msgspec.Struct, tag="fork", array_like=True, frozen=True):
    """Fork a worker; its socket comes with this message."""

    worker: int


class KillWorker(msgspec.Struct, tag="kill", array_like=True, frozen=True):
    """Kill a worker and its whole process group."""

    worker: int


class ServerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The fork server takes orders."""


class RulePreloaded(msgspec.Struct, tag="preloaded", array_like=True, frozen=True):
    """The fork server has loaded a rule, or `error` says why not."""

    rule: int
    error: str | None


class WorkerForked(msgspec.Struct, tag="forked", array_like=True, frozen=True):
    """A worker was forked and has this process id."""

    worker: int
    pid: int


class WorkerExited(msgspec.Struct, tag="exited", array_like=True, frozen=True):
    """A worker and its process group are gone; the code is negative for a signal, None if the fork failed."""

    worker: int
    code: int | None


ToForkServer = PreloadRule | ForkWorker | KillWorker
FromForkServer = ServerReady | RulePreloaded | WorkerForked | WorkerExited
ToWorker = LoadRule | ScoreItems


def encode(message: msgspec.Struct) -> bytes:
    """Return one message as bytes, with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a stream of bytes into the bodies of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that are complete now, in order."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _LENGTH.size:
                end = at + _LENGTH.size + _LENGTH.unpack_from(self._buffer, at)[0]
                # the rest of the body is still on its way
                if len(self._buffer) < end:
                    return
                body, at = bytes(self._buffer[at + _LENGTH.size : end]), end
                yield body
        finally:
            # also when the caller stops in the middle: the bodies it has seen must not come a second time
            del self._buffer[:at]
