"""What a trainer says: lineages, marks, checkpoints, batches, acks; and the ledger."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from pydantic import Field

from tba.api.base import MAX_LINEAGE, MAX_STEP, Integer, Name, Number, VersionText
from tba.config.base import StrictModel


class LineageRequest(StrictModel):
    """POST /v1/lineages: a trainer starts. `parent` is the version it starts from.

    The same `request_id` again, however late, is answered with the lineage and the token that it took, and changes
    nothing. Every start makes one of its own; it is a secret, because whoever has it is told the token.
    """

    trainer_id: Name
    parent: VersionText
    request_id: Name = Field(default_factory=lambda: secrets.token_hex(16))


class LineageReply(StrictModel):
    """The new lineage and its fencing token; every older token is refused from now on."""

    lineage: int
    token: str


class MarkRequest(StrictModel):
    """POST /v1/marks: announce a published version and set the sync mark."""

    version: VersionText
    token: Name


class MarkReply(StrictModel):
    """Where in the log the mark stands."""

    log_position: int


class CheckpointRequest(StrictModel):
    """POST /v1/checkpoints: a checkpoint is complete in the store; resume starts from the last one registered."""

    version: VersionText
    token: Name
    key: Name


class BatchRequest(StrictModel):
    """POST /v1/batches: draw the batch for optimizer step `step` (1 is the first), waiting up to `wait_s`."""

    trainer_id: Name
    lineage: Integer = Field(ge=0, le=MAX_LINEAGE)
    step: Integer = Field(ge=1, le=MAX_STEP)
    token: Name
    wait_s: Number = Field(default=0.0, ge=0, le=60)


class AckRequest(StrictModel):
    """POST /v1/batches/{batch_id}/ack: step (lineage, step) consumed the batch; `metrics` go to the ledger."""

    lineage: Integer = Field(ge=0, le=MAX_LINEAGE)
    step: Integer = Field(ge=1, le=MAX_STEP)
    token: Name
    metrics: dict[Name, float | None] = Field(default_factory=dict)
    policy_ages: list[Annotated[Integer, Field(ge=-MAX_STEP, le=MAX_STEP)]] = Field(default_factory=list)


class LedgerEntry(StrictModel):
    """A line of the ledger: step (lineage, step) consumed a batch.

    `seed` and `log_position` reproduce the draw, `slots` counts it (total, recent, replay, fallback, rollouts,
    distinct_rollouts); lines of older releases lack them. `abandoned`: a resume went on from an earlier step.
    """

    kind: Literal["batch"] = "batch"
    lineage: int
    step: int
    batch_id: str
    acked_at_s: float
    seed: int | None = None
    log_position: int | None = None
    slots: dict[str, int] = Field(default_factory=dict)
    num_rollouts: int
    rollout_ids: list[str]
    metrics: dict[str, float | None]
    abandoned: bool


class ResumeEntry(StrictModel):
    """A line of the ledger: a trainer started, took `lineage` and went on from version `parent`."""

    kind: Literal["resume"]
    lineage: int
    parent: VersionText
    trainer_id: str
    resumed_at_s: float


LedgerLine = LedgerEntry | ResumeEntry


class LedgerReply(StrictModel):
    """GET /v1/ledger?after=N&limit=N: lines in order; `next` is None at the end."""

    entries: list[LedgerLine]
    next: int | None


class SampleRequest(StrictModel):
    """POST /v1/samples: draw rollouts from everything that is stored and scored, by priority; nothing is recorded.

    Without `seed` the buffer takes one; the same seed at the same log position draws the same rollouts.
    """

    num: Integer = Field(ge=1, le=512)
    seed: Integer | None = Field(default=None, ge=0, lt=2**63)
