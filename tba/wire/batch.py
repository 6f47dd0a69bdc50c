"""The batch of one optimizer step: groups of rollouts, whose payloads the buffer does not decode again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from tba.errors import MalformedError, WireError
from tba.fields import MAX_SEED, is_bounded
from tba.wire.codec import Document, Name, pack, unpack
from tba.wire.rollout import Rollout, check_push, rollout_of

BATCH_SCHEMA = 1
MAX_BATCH_BYTES = 1 << 30

Source = Literal["recent", "replay"]
Position = Annotated[int, Meta(ge=0, le=MAX_SEED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """K rollouts of one prompt that one slot drew together.

    `source` is where the slot drew from; `fallback` is true when MOP wanted recent data and there was not enough.
    """

    prompt_id: str
    source: Source
    fallback: bool
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRollout:
    """A rollout of a batch that cannot be trained on: `reason` is for counters, `detail` for people."""

    prompt_id: str
    reason: str
    detail: str
    num_tokens: int | None = None
    """Response tokens; None: it could not be decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one optimizer step. `seed` and `log_position` reproduce the draw."""

    batch_id: str
    deadline_s: float
    """Unix seconds; afterwards the batch is void and an ack is refused."""
    seed: int
    log_position: int
    groups: tuple[Group, ...]
    refused: tuple[RefusedRollout, ...] = ()
    """Invalid rollouts; they are in no group, which may be smaller for it, or missing."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def group_numbers(self) -> list[int]:
        """The place in `groups` of each of `rollouts`: two slots of one prompt are two groups."""
        return [number for number, group in enumerate(self.groups) for _ in group.rollouts]


class DrawnGroup(Document):
    """A group as the buffer holds it, and as it is on the wire: payload bytes, which it does not decode again."""

    prompt_id: Name
    source: Source
    fallback: bool
    payloads: Annotated[Sequence[bytes], Meta(min_length=1)] = field(name="rollouts")


class _BatchDocument(Document):
    schema: Literal[1]
    batch_id: Name
    deadline_s: float
    seed: Position
    log_position: Position
    groups: Annotated[list[DrawnGroup], Meta(min_length=1)]


def encode_batch(
    *, batch_id: str, deadline_s: float, seed: int, log_position: int, groups: Sequence[DrawnGroup]
) -> bytes:
    """Encode one batch as msgpack."""
    return pack(_BatchDocument(BATCH_SCHEMA, batch_id, float(deadline_s), seed, log_position, list(groups)))


_BATCH_DECODER = msgspec.msgpack.Decoder(_BatchDocument)


def decode_batch(data: bytes) -> Batch:
    """Decode and validate one batch and every rollout in it; an invalid rollout costs no other one.

    Raises:
        MalformedError, SchemaVersionError, LimitError: the batch around the rollouts is not valid.
    """
    document = unpack(data, _BATCH_DECODER, what="batch", schema=BATCH_SCHEMA, max_bytes=MAX_BATCH_BYTES)
    # msgpack can carry NaN and infinity, and a deadline of NaN would never pass
    if not is_bounded(document.deadline_s):
        raise MalformedError(f"batch: field 'deadline_s' is {document.deadline_s}, which is not a valid time")
    items = iter(check_push([payload for group in document.groups for payload in group.payloads]))
    groups: list[Group] = []
    refused: list[RefusedRollout] = []
    for group in document.groups:
        rollouts = []
        for item in islice(items, len(group.payloads)):
            if isinstance(item, WireError):
                refused.append(RefusedRollout(prompt_id=group.prompt_id, reason=item.slug, detail=str(item)))
            else:
                rollouts.append(rollout_of(item))
        # the trainer counts what is missing; a group without rollouts would break its means
        if rollouts:
            kept = tuple(rollouts)
            groups.append(Group(prompt_id=group.prompt_id, source=group.source, fallback=group.fallback, rollouts=kept))
    return Batch(
        batch_id=document.batch_id,
        deadline_s=document.deadline_s,
        seed=document.seed,
        log_position=document.log_position,
        groups=tuple(groups),
        refused=tuple(refused),
    )
