"""The messages between the service and a model process: msgpack, each message after its length in four bytes.

The child, whose argument says what to load, begins with `Loaded` or `LoadFailed`. After that the service sends
`ScoreRequest` and `CancelRequest`. The child sends `BatchStarted` before it computes a batch, and one
`ScoreAnswer` for each request.
"""

from __future__ import annotations

import msgspec

from tba_reward.scorer import Outcome

LENGTH_BYTES = 4


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Score one completion.

    Attributes:
        finished: whether the response ended by itself.
        alone: whether it needs a batch of its own, because a process may have died over it.
    """

    number: int
    prompt: str
    response: str
    finished: bool = True
    alone: bool = False


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody waits for a request any more; it is answered all the same, at once where its batch has not started."""

    number: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The models are ready. `digest`: SHA-256 of all their files."""

    digest: str


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The models cannot be loaded; the process ends."""

    detail: str


class BatchStarted(msgspec.Struct, frozen=True, kw_only=True, tag="batch_started"):
    """These requests are computed from now on, together."""

    numbers: list[int]


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The outcome of a request."""

    number: int
    outcome: Outcome


ToChild = ScoreRequest | CancelRequest
FromChild = Loaded | LoadFailed | BatchStarted | ScoreAnswer


def frame(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message with its length in front.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    # no pickle: a child that runs foreign model code must not choose what the service executes
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
