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
    """POST /v1/lineages: start a lineage, as every start and every rollback of a trainer does.

    A request with a known `request_id`, however late, gets the same lineage and token, and changes nothing. Every start
    makes a `request_id` of its own. It is a secret, because a request with it is answered with the token.

    `parent`: the version that the trainer starts from. Registered checkpoints of later steps are no longer resumed
    from. `checkpoint_key`: the checkpoint of `parent`, for a later resume; None: that resume starts the run anew.
    `rollback`: an alarm of the previous lineage caused this start; such starts are counted. `obeys`: the request id of
    the operator's rollback that this start carries out; the start is refused if that rollback is not waiting.
    `fails`: no checkpoint is left to return to, so the run fails in the same call, for this reason. `in_process`: the
    process that trained the previous lineage goes on, so a stop or failure of the run in between stays in force. A new
    process continues the run instead.
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
    """Reply to an announcement: the log position of the publication."""

    log_position: int


class CheckpointRequest(StrictModel):
    """POST /v1/checkpoints: register a checkpoint that is complete in the store; a resume starts from the last one."""

    version: VersionText
    token: Name
    key: ObjectKey
    kept: list[VersionText] | None = None
    """The checkpoints of this lineage and its ancestors that the trainer keeps. It deletes the others after this call,
    so no rollback may return to them. None: it deletes none."""


class CheckpointList(StrictModel):
    """GET /v1/checkpoints: the checkpoints that a rollback can return to."""

    versions: list[VersionText]
    """The complete checkpoints, kept by the trainer, of the active lineage and its ancestors, newest first."""


class BatchRequest(StrictModel):
    """POST /v1/batches: draw the batch of optimizer step `step` (1 is the first); wait for it up to `wait_s`."""

    trainer_id: Name
    lineage: Integer = Field(ge=0, le=MAX_LINEAGE)
    step: Integer = Field(ge=1, le=MAX_STEP)
    token: Name
    wait_s: Number = Field(default=0.0, ge=0, le=60)


class TrainedRollouts(StrictModel):
    """The advantage and the weight of each rollout that a step consumed; the three lists are parallel.

    `advantages`: A_j; null if the objective has none. `weights`: the mean weight of a rollout's tokens; null if no
    forward pass was made for it. Refused rollouts are left out.
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

    `settings_revision`: revision of the live settings that the step was made with. `skipped`: the reason why the step
    left the weights unchanged; none of its rollouts counts as trained. `refused`: reason -> number of rollouts that the
    trainer could not use. `policy_ages`: policy age, in steps, of each other rollout. `num_tokens`: response tokens of
    the rollouts that the step trained on. `unreadable`: the refused rollouts that could not be decoded, as indices into
    the rollouts of the batch. `trained`: each rollout's advantage and weight, kept for people for the newest steps.
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

    `seed`, `log_position` and `most_on_policy_prob` reproduce the draw. `slots` has its counts (total, recent, replay,
    fallback, rollouts, distinct_rollouts). `skipped` and `refused` are those of `AckRequest`.
    `abandoned`: a resume went back to an earlier step, so the active lineage does not have this one.
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
    """A line of the ledger: a trainer started `lineage` from version `parent`."""

    kind: Literal["resume"]
    lineage: int
    parent: VersionText
    trainer_id: str
    resumed_at_s: float


LedgerLine = LedgerEntry | ResumeEntry


class LedgerReply(StrictModel):
    """GET /v1/ledger?after=N&limit=N: lines in order. Send `next` as `after` to get more; it is None at the end."""

    entries: list[LedgerLine]
    next: int | None
    num_lines: int = 0
    """Lines of the whole ledger, damaged ones included."""
