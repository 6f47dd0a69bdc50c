"""Records of the newest optimizer steps: the advantage A_j and the mean token weight of each consumed rollout.

The trainer reports these values with its ack. ack.lua stores one record per step, beside the line of the ledger, and
keeps the newest MAX_TRAINED_STEPS. Only GET /v1/rollouts/{rollout_id} reads them: they are for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from tba.api import AckRequest, TrainedStep
from tba.fields import MAX_LINEAGE, MAX_STEP, is_bounded
from tba.versions import PolicyVersion
from tba_buffer.run.lineage import Lineages
from tba_buffer.storage.context import Context, RunHash, needed
from tba_buffer.storage.redis_client import redis_errors

MAX_TRAINED_STEPS = 2000
"""How many of the newest steps have a record in Redis: 24 bytes per rollout."""
ID_BYTES = 16
DROPPED = "trained_steps:dropped"
"""The counter of records that ack.lua has trimmed."""
RECORDS_PER_READ = 32
"""Records read from Redis at once. A record has 12 KB with 512 rollouts, and at most 1.6 MB."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One acked step. Per rollout: 16 bytes of id, a float32 advantage and weight (little-endian; NaN: none)."""

    # array_like: the order of the fields is the stored format, so new ones come last and have a default
    lineage: int
    step: int
    acked_at_s: float
    skipped: str | None
    rollout_ids: bytes
    advantages: bytes
    weights: bytes

    @property
    def version(self) -> PolicyVersion:
        """The version that the step made."""
        return PolicyVersion(self.lineage, self.step)

    def rows_of(self, rollout_id: bytes) -> Iterator[int]:
        """Yield the places of a rollout in the columns; there are several if it was drawn more than once."""
        at = self.rollout_ids.find(rollout_id)
        while at >= 0:
            if at % ID_BYTES == 0:  # else the end of an id and the beginning of the next one
                yield at // ID_BYTES
            at = self.rollout_ids.find(rollout_id, at + 1)


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepRecord)


def encode_trained(request: AckRequest, *, acked_at_s: float) -> bytes:
    """Encode the values that an ack reports per rollout as a StepRecord; b"" if it reports none."""
    trained = request.trained
    if trained is None or not trained.rollout_ids:
        return b""
    return _ENCODER.encode(
        StepRecord(
            lineage=request.lineage,
            step=request.step,
            acked_at_s=acked_at_s,
            skipped=request.skipped,
            rollout_ids=bytes.fromhex("".join(trained.rollout_ids)),
            advantages=np.array(trained.advantages, dtype="<f4").tobytes(),  # None becomes NaN
            weights=np.array(trained.weights, dtype="<f4").tobytes(),
        )
    )


def decode_trained(data: bytes) -> StepRecord:
    """Decode the bytes of `encode_trained`.

    Raises:
        ValueError: they are damaged.
    """
    record = _DECODER.decode(data)
    num, rest = divmod(len(record.rollout_ids), ID_BYTES)
    if rest or not len(record.advantages) == len(record.weights) == 4 * num:
        raise ValueError(f"its columns have {num} ids, {len(record.advantages)} and {len(record.weights)} bytes")
    if not (0 <= record.lineage <= MAX_LINEAGE and 0 <= record.step <= MAX_STEP and is_bounded(record.acked_at_s)):
        raise ValueError(f"it is of step {record.version} at {record.acked_at_s}")
    return record


def _number(column: bytes, row: int) -> float | None:
    """Return the float32 at place `row` of a packed column, rounded to 6 significant digits; None for NaN."""
    value = float(np.frombuffer(column, dtype="<f4", count=1, offset=4 * row)[0])
    return float(f"{value:.6g}") if math.isfinite(value) else None


class TrainedSteps:
    """Reads the records from Redis page by page, and caches none, because requests for one rollout are rare.

    Args:
        context: Redis and settings.
        lineages: say which steps a resume has abandoned.
    """

    def __init__(self, context: Context, lineages: Lineages) -> None:
        self._context, self._lineages = context, lineages

    async def of(self, rollout_id: bytes) -> tuple[list[TrainedStep], str | None]:
        """Return the recorded steps that consumed a rollout, oldest first; and the version of the oldest recorded step.

        O(kept rollouts): about 0.1 s for 2,000 steps of 512.
        """
        key, end = self._context.keys.trained, -1
        rows_of: dict[PolicyVersion, tuple[StepRecord | None, list[int]]] = {}
        # from the newest on: a step that is acked meanwhile moves the others, so one may be read twice, none is missed
        while True:
            with redis_errors("read what steps have trained"):
                page = await self._context.redis.lrange(key, end - RECORDS_PER_READ + 1, end)
            if not page:
                break
            for raw in reversed(page):
                record = needed(key, "a record", lambda raw=raw: decode_trained(raw))
                rows = list(record.rows_of(rollout_id))
                rows_of[record.version] = (record if rows else None), rows  # a record of a large batch has 1.6 MB
            end -= RECORDS_PER_READ
        # read behind the records: a history that is older than they are would call new steps abandoned
        history = self._lineages.history((await RunHash.read(self._context)).lineage)
        found = [(record, rows) for record, rows in reversed(rows_of.values()) if record is not None]
        steps = [
            TrainedStep(
                version=str(record.version),
                at_s=record.acked_at_s,
                advantage=_number(record.advantages, row),
                weight=_number(record.weights, row),
                skipped=record.skipped,
                abandoned=record.step > history.get(record.lineage, -1),
            )
            for record, rows in found
            for row in rows
        ]
        return steps, str(next(reversed(rows_of))) if rows_of else None
