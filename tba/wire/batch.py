"""The batch: the groups that one optimizer step trains on, with what is needed to draw it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.errors import MalformedError
from tba.wire.codec import Reader, pack, unpack
from tba.wire.rollout import Rollout, decode_rollout

SCHEMA = 1
SOURCES = ("recent", "replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """K rollouts of one prompt that one slot drew together.

    `source` is what the slot drew from; `fallback` is true when MOP wanted recent data and there was not enough.
    """

    prompt_id: str
    source: str
    fallback: bool
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one optimizer step. `seed` and `log_position` reproduce the draw; after `deadline_s` (Unix
    seconds) the batch is void and an ack is refused."""

    batch_id: str
    deadline_s: float
    seed: int
    log_position: int
    groups: tuple[Group, ...]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """A group as the buffer holds it: payload bytes that it does not decode again."""

    prompt_id: str
    source: str
    fallback: bool
    payloads: Sequence[bytes]


def encode_batch(
    *, batch_id: str, deadline_s: float, seed: int, log_position: int, groups: Sequence[DrawnGroup]
) -> bytes:
    """msgpack bytes of one batch."""
    return pack(
        {
            "schema": SCHEMA,
            "batch_id": batch_id,
            "deadline_s": float(deadline_s),
            "seed": seed,
            "log_position": log_position,
            "groups": [
                {
                    "prompt_id": group.prompt_id,
                    "source": group.source,
                    "fallback": group.fallback,
                    "rollouts": list(group.payloads),
                }
                for group in groups
            ],
        }
    )


def decode_batch(data: bytes) -> Batch:
    """Decode and validate one batch and every rollout in it.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    fields = Reader(unpack(data, what="batch", max_bytes=1 << 30), what="batch")
    fields.schema(SCHEMA)
    batch = Batch(
        batch_id=fields.name("batch_id"),
        deadline_s=fields.number("deadline_s"),
        seed=fields.integer("seed", 0, 2**63 - 1),
        log_position=fields.integer("log_position", 0, 2**63 - 1),
        groups=tuple(_group(item) for item in fields.take("groups", list)),
    )
    fields.done()
    if not batch.groups:
        raise MalformedError(f"batch {batch.batch_id}: no groups")
    return batch


def _group(item: object) -> Group:
    if not isinstance(item, dict):
        raise MalformedError(f"batch: a group must be a map, got {type(item).__name__}")
    fields = Reader(item, what="batch group")
    prompt_id = fields.name("prompt_id")
    payloads = fields.take("rollouts", list)
    if not payloads or not all(isinstance(payload, bytes) for payload in payloads):
        raise MalformedError(f"batch: group {prompt_id!r} must hold the bytes of at least one rollout")
    group = Group(
        prompt_id=prompt_id,
        source=fields.choice("source", SOURCES),
        fallback=fields.take("fallback", bool),
        rollouts=tuple(decode_rollout(payload) for payload in payloads),
    )
    fields.done()
    return group
