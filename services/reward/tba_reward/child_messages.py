"""The messages between the service and its child processes: msgpack, each preceded by its length in 4 bytes.

    service --LoadRule, ScoreItems--> worker (process_pool) --Reply--> service
    service --ScoreRequest, CancelRequest--> model process (model_server) --BatchStarted, ScoreAnswer--> service

A model process gets the models to load as a command-line argument, and first sends `Loaded` or `LoadFailed`. It sends
`BatchStarted` before it computes a batch, and one `ScoreAnswer` for each request.
"""

from __future__ import annotations

import signal
import struct
from typing import BinaryIO

import msgspec

from tba_reward.scorer import Outcome

LENGTH = struct.Struct(">I")


class LoadRule(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Ask a worker to load rule number `rule`; it sends one Reply. `is_batch`: the function takes a list of items."""

    number: int
    rule: int
    function: str
    params_json: str
    prepare: str | None
    is_batch: bool


class ItemMessage(msgspec.Struct, array_like=True, frozen=True):
    """An item as it is sent to a worker."""

    prompt: str
    response: str
    data_json: str
    finish_reason: str
    response_tokens: list[int] | None


class ScoreItems(msgspec.Struct, tag="score", array_like=True, frozen=True):
    """Ask a worker to apply rule number `rule`. It sends one Reply for all items (`is_batch`), else one per item."""

    number: int
    rule: int
    items: list[ItemMessage]


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """A worker's reply to the LoadRule or ScoreItems that has the same `number`.

    `outcomes`: for a LoadRule one, which is a Failure unless the rule was loaded; for a ScoreItems those of its next
    items. `cpu_s`: CPU seconds that the worker has used since its start. `pid`: the worker's process id.
    """

    number: int
    outcomes: list[Outcome]
    cpu_s: float
    pid: int


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Score one completion.

    Attributes:
        finished: whether the response ended by itself and was not cut off.
        alone: whether the request needs a batch of its own, because it may have killed an earlier process.
    """

    number: int
    prompt: str
    response: str
    finished: bool = True
    alone: bool = False


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Cancel a request. It still gets an answer: a Failure at once, or its score if its batch has started."""

    number: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The models are ready. `digest`: SHA-256 of all their files."""

    digest: str


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The models cannot be loaded; the process ends."""

    detail: str


class BatchStarted(msgspec.Struct, frozen=True, kw_only=True, tag="batch_started"):
    """The model process begins to compute these requests as one batch."""

    numbers: list[int]


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The outcome of a request."""

    number: int
    outcome: Outcome


ToModels = ScoreRequest | CancelRequest
FromModels = Loaded | LoadFailed | BatchStarted | ScoreAnswer


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as bytes, with its length in front.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    # no pickle: a child that runs foreign code must not choose what the service executes
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the bytes of the next message without its length; None if the stream ends before the message does."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    body = stream.read(length := LENGTH.unpack(head)[0])
    return body if len(body) == length else None


def describe_exit(code: int | None) -> str:
    """Return a phrase that says how a process ended; a negative exit code is a signal, None is unknown."""
    if code is None:
        return "its exit code is not known"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"killed by {name}, as the kernel does when memory runs out" if name == "SIGKILL" else f"killed by {name}"
