"""The batch of one optimizer step: groups of rollouts."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from tba.errors import MalformedError, WireError
from tba.fields import MAX_SEED, is_bounded
from tba.wire.codec import Document, Name, NoSchema, pack, unpack
from tba.wire.rollout import Rollout, decode_rollouts

BATCH_SCHEMA = 1
MAX_BATCH_BYTES = 1 << 30

Source = Literal["recent", "replay"]
Position = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Item = TypeVar("Item", Rollout, bytes)
"""A decoded rollout; or its encoded bytes, in the buffer (which does not decode them for a batch) and on the wire."""


class Group(Document, Generic[Item], frozen=True):
    """K rollouts of one prompt that one slot drew together.

    `source`: the rollouts that the slot drew from. `fallback`: MOP chose recent rollouts, but there were too few.
    """

    prompt_id: Name
    source: Source
    fallback: bool
    rollouts: Annotated[tuple[Item, ...], Meta(min_length=1)]


class Refusal(Document, frozen=True):
    """Why a rollout of a batch cannot be trained on: `reason` is for counters, `detail` for people."""

    reason: str
    detail: str


class Batch(Document, Generic[Item], frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag=1):
    """The groups of one optimizer step. `seed` and `log_position` reproduce the draw.

    Rollouts that the trainer refuses are removed from `groups`, so a group may be smaller or missing.
    """

    batch_id: Name
    deadline_s: float
    """Time, in Unix seconds, after which the batch is void and its ack is refused."""
    seed: Position
    log_position: Position
    groups: Annotated[tuple[Group[Item], ...], Meta(min_length=1)]
    refused: tuple[Refusal, ...] = ()
    scores_failed: dict[str, int] = field(default_factory=dict)
    """Stored rollouts without a score, by reason, when the batch was drawn; the newest 500 are counted."""
    unreadable: tuple[int, ...] = ()
    """Rollouts that could not be decoded, as indices into the drawn rollouts (group after group)."""

    @property
    def rollouts(self) -> list[Item]:
        """All rollouts, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def group_numbers(self) -> list[int]:
        """For each of `rollouts`, the index of its group in `groups`; two slots of one prompt are two groups."""
        return [number for number, group in enumerate(self.groups) for _ in group.rollouts]


_DECODER = msgspec.msgpack.Decoder(Batch[bytes] | NoSchema)


def encode_batch(batch: Batch[bytes]) -> bytes:
    """Encode one batch as msgpack."""
    return pack(batch)


def decode_batch(data: bytes) -> Batch[Rollout]:
    """Decode and validate one batch and its rollouts. Invalid rollouts go to `refused`; the others remain.

    Raises:
        MalformedError, SchemaVersionError, LimitError: the batch itself, apart from its rollouts, is not valid.
    """
    drawn = unpack(data, _DECODER, what="batch", schema=BATCH_SCHEMA, max_bytes=MAX_BATCH_BYTES)
    # msgpack can carry NaN and infinity, and a deadline of NaN would never pass
    if not is_bounded(drawn.deadline_s):
        raise MalformedError(f"batch: field 'deadline_s' is {drawn.deadline_s}, which is not a valid time")
    items = decode_rollouts(drawn.rollouts)
    unreadable = {place: item for place, item in enumerate(items) if isinstance(item, WireError)}
    left, groups = iter(items), []
    for group in drawn.groups:
        rollouts = tuple(item for item in islice(left, len(group.rollouts)) if isinstance(item, Rollout))
        # the trainer counts what is missing; a group without rollouts would break its means
        if rollouts:
            groups.append(Group(group.prompt_id, group.source, group.fallback, rollouts))
    return Batch(
        batch_id=drawn.batch_id,
        deadline_s=drawn.deadline_s,
        seed=drawn.seed,
        log_position=drawn.log_position,
        groups=tuple(groups),
        scores_failed=drawn.scores_failed,
        refused=tuple(Refusal(error.slug, str(error)) for error in unreadable.values()),
        unreadable=tuple(unreadable),
    )
