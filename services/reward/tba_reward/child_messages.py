"""The messages between the service and a worker: msgpack, each one behind its length.

service --LoadRule, ScoreItems--> worker --Reply--> service
"""

from __future__ import annotations

import struct

import msgspec

from tba_reward.scorer import Outcome

LENGTH = struct.Struct(">I")


class LoadRule(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Load rule `rule`; answered by a Reply. `is_batch`: the function takes a list of items."""

    number: int
    rule: int
    function: str
    params_json: str
    prepare: str | None
    is_batch: bool


class ItemMessage(msgspec.Struct, array_like=True, frozen=True):
    """An item on its way to a worker."""

    prompt: str
    response: str
    data_json: str
    finish_reason: str
    response_tokens: list[int] | None


class ScoreItems(msgspec.Struct, tag="score", array_like=True, frozen=True):
    """Apply rule `rule` to items; answered by one Reply for all of them, or by one for each, in order."""

    number: int
    rule: int
    items: list[ItemMessage]


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The outcomes of the LoadRule with this number, or of the next items of the ScoreItems.

    A LoadRule has one outcome, which is no Failure when the rule was loaded. `cpu_s` is the CPU time of the worker
    since it was started, `pid` its process.
    """

    number: int
    outcomes: list[Outcome]
    cpu_s: float
    pid: int


def encode(message: msgspec.Struct) -> bytes:
    """Return one message as bytes, with its length in front."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
