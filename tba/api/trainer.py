"""Requests of a trainer (lineages, publications, checkpoints, batches, acks), and the ledger."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tba.fields import MAX_LINEAGE, MAX_STEP, Integer, Name, Number, StrictModel, VersionText
from tba.fields import Reason as FailReason
from tba.store.file import MAX_KEY_CHARS, PART

Reason = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
"""Why a batch was skipped or a rollout refused; used as a label of metrics."""
MAX_REASONS = 32
ObjectKey = Annotated[str, Field(pattern=f"^{PART}(/{PART})*$", max_length=MAX_KEY_CHARS)]
"""A key that every store can hold (`tba.store.file.check_key`)."""


class LineageRequest(StrictModel):
    """POST /v1/lineages: a trainer starts. `parent` is the version it starts from.

    The same `request_id` again, however late, is answered with the same lineage and token, and changes nothing. Every
    start makes its own; it is a secret, because a request with it is answered with the token.

    A resume no longer starts from a registered checkpoint of a later step than `parent`, but from the checkpoint of
    `parent` at `checkpoint_key`, or from the start of the run if there is none. `rollback`: an alarm of the previous
    lineage led to this start, which is counted. `obeys`: the request id of the operator's rollback that this start
    does; it no longer waits, and where it does not wait, the start is refused. `fails`: nothing is left that it could
    return to, and the run fails for this reason in the same call. `in_process`: the trainer's process has trained the
    lineage before this one; a stop or a failure that came between the two stays, where a process that starts continues
    the run.
    """

    trainer_id: Name
    parent: VersionText
    checkpoint_key: ObjectKey | None = None
    rollback: bool = False
    obeys: Name | None = None
    fails: FailReason | None = None
    in_process: bool = False
    # drawn by `secrets`, since a request with it is answered with the fencing token
    request_id: Name = Field(default_factory=partial(secrets.token_hex, 16))


class LineageReply(StrictModel):
    """The new lineage and its fencing token; every older token is refused from now on."""

    lineage: int
    token: str


class VersionRequest(StrictModel):
    """POST /v1/versions: announce a published version, so that searchers load it."""

    version: VersionText
    token: Name


class VersionReply(StrictModel):
    """Where in the log the announcement stands."""

    log_position: int


class CheckpointRequest(StrictModel):
    """POST /v1/checkpoints: a checkpoint is complete in the store; resume starts from the last one registered."""

    version: VersionText
    token: Name
    key: ObjectKey
    kept: list[VersionText] | None = None
    """The checkpoints of this history that the trainer keeps: it deletes others after this call, so no rollback returns
    to them. None: it deletes none."""


class CheckpointList(StrictModel):
    """GET /v1/checkpoints: what a rollback can return to."""

    versions: list[VersionText]
    """The complete checkpoints that the active lineage wrote or descends from and keeps, newest first."""


class BatchRequest(StrictModel):
    """POST /v1/batches: draw the batch for optimizer step `step` (1 is the first), waiting up to `wait_s`."""

    trainer_id: Name
    lineage: Integer = Field(ge=0, le=MAX_LINEAGE)
    step: Integer = Field(ge=1, le=MAX_STEP)
    token: Name
    wait_s: Number = Field(default=0.0, ge=0, le=60)


class TrainedRollouts(StrictModel):
    """What a step made of each rollout that it consumed; all three lists are equally long.

    `advantages`: A_j; null: the objective has none. `weights`: the mean weight of a rollout's tokens; null: no pass was
    made for it. Refused rollouts are not in it.
    """

    rollout_ids: list[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]] = Field(max_length=65_536)
    advantages: list[Number | None]
    weights: list[Number | None]

    @model_validator(mode="after")
    def _check_lengths(self) -> TrainedRollouts:
        if not len(self.rollout_ids) == len(self.advantages) == len(self.weights):
            raise ValueError(
                f"{len(self.rollout_ids)} rollout_ids, {len(self.advantages)} advantages and {len(self.weights)} "
                "weights; there must be one of each per rollout"
            )
        return self


class AckRequest(StrictModel):
    """POST /v1/batches/{batch_id}/ack: step (lineage, step) consumed the batch; `metrics` go to the ledger.

    `settings_revision`: of the live settings that the step was made with. `skipped`: why this step left the weights as
    they were; none of the rollouts counts as trained. `refused`: reason -> rollouts that the trainer could not use;
    `policy_ages` are those of the others. `num_tokens`: response tokens of the rollouts that the step trained on.
    `unreadable`: the places in the batch of rollouts that could not be decoded, which are among the refused ones.
    `trained`: what became of each rollout, for people; the newest steps are kept (GET /v1/rollouts/{rollout_id}).
    """

    lineage: Integer = Field(ge=0, le=MAX_LINEAGE)
    step: Integer = Field(ge=1, le=MAX_STEP)
    token: Name
    metrics: dict[Name, Number | None] = Field(default_factory=dict)
    policy_ages: list[Annotated[Integer, Field(ge=-MAX_STEP, le=MAX_STEP)]] = Field(default_factory=list)
    settings_revision: Integer = Field(default=0, ge=0, le=MAX_STEP)
    skipped: Reason | None = None
    refused: dict[Reason, Annotated[Integer, Field(ge=1)]] = Field(default_factory=dict, max_length=MAX_REASONS)
    unreadable: list[Annotated[Integer, Field(ge=0)]] = Field(default_factory=list)
    num_tokens: Integer = Field(default=0, ge=0)
    trained: TrainedRollouts | None = None


class LedgerEntry(StrictModel):
    """A line of the ledger: step (lineage, step) consumed a batch.

    `seed`, `log_position` and `most_on_policy_prob` reproduce the draw, `slots` counts it (total, recent, replay,
    fallback, rollouts, distinct_rollouts). `skipped` and `refused` as in the ack.
    `abandoned`: a resume continued from an earlier step.
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
    most_on_policy_prob: float | None = None
    settings_revision: int = 0
    """Revision of the live settings that the step was made with."""
    skipped: str | None = None
    refused: dict[str, int] = Field(default_factory=dict)
    abandoned: bool


class ResumeEntry(StrictModel):
    """A line of the ledger: a trainer started, took `lineage` and continued from version `parent`."""

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
    num_lines: int = 0
    """Of the whole ledger, damaged ones too."""
