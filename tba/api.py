"""The JSON bodies of the REST endpoints, shared by services and clients (docs/api.md).

Bulk data is msgpack (`tba.wire`): POST /v1/rollouts takes a push, POST /v1/batches answers a batch, POST
/v1/heartbeats takes a heartbeat. Everything else is one of these models. Versions are `lineage-step` texts.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from tba.config.base import StrictModel

RunState = Literal["running", "paused", "stopping", "done", "failed"]
Split = Literal["train", "heldout"]
VersionText = Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")]
Name = Annotated[str, Field(min_length=1, max_length=256)]
MAX_LEASE_IDS = 4096
"""Most leases in one return or renewal."""
MAX_REFUSED_VERSIONS = 64


class Problem(StrictModel):
    """RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    retry_after_s: float | None = None
    wait: str | None = None


class Prompt(StrictModel):
    """One question with its task name and the data its reward needs."""

    prompt_id: Name
    task: Name
    text: str = Field(min_length=1, max_length=1_000_000)
    data: dict[str, Any] = Field(default_factory=dict)
    split: Split = "train"

    @field_validator("data")
    @classmethod
    def _is_plain_json(cls, data: dict[str, Any]) -> dict[str, Any]:
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()  # NaN and lone surrogates raise ValueError
        return data


class PromptUpload(StrictModel):
    """POST /v1/prompts: idempotent by prompt id; the same id with other content is refused."""

    prompts: list[Prompt] = Field(min_length=1, max_length=10_000)


class PromptUploadReply(StrictModel):
    """What an upload changed."""

    num_new: int
    num_same: int
    num_train: int
    num_heldout: int


class LeaseRequest(StrictModel):
    """POST /v1/leases: claim up to `max_leases` visits; no evaluations of `refused_versions`, which it cannot use."""

    searcher_id: Name
    max_leases: int = Field(ge=1, le=1024)
    version: VersionText | None = None
    refused_versions: list[VersionText] = Field(default_factory=list, max_length=MAX_REFUSED_VERSIONS)


class Lease(StrictModel):
    """A claim on one visit of one prompt.

    `train`: sample `num_rollouts` completions with the newest weights and push them under `visit_id`.
    `sample`, `greedy`: held-out evaluation `eval_id` with exactly `version`; report with POST /v1/evals/{id}/results.
    """

    lease_id: str
    kind: Literal["train", "sample", "greedy"]
    visit_id: str
    prompt: Prompt
    num_rollouts: int
    expires_in_s: float
    eval_id: str | None = None
    version: VersionText | None = None


class LeaseReply(StrictModel):
    """`leases` may be empty; then `wait` names what is waited for and `retry_after_s` when to ask again."""

    leases: list[Lease]
    latest_version: VersionText | None
    run_state: RunState
    wait: str | None = None
    retry_after_s: float = 0.0


class LeaseReturn(StrictModel):
    """POST /v1/leases/return: give unfinished leases back (drain). Refused: the visit cannot be sampled, and ends."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)
    refused_lease_ids: list[Name] = Field(default_factory=list, max_length=MAX_LEASE_IDS)


class LeaseRenewal(StrictModel):
    """POST /v1/leases/renew: these leases are still worked on; their deadline moves to `lease_s` from now."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)


class LeaseRenewalReply(StrictModel):
    """The leases that this searcher holds no more: fulfilled, ended, or another searcher's by now."""

    lost_lease_ids: list[str]


class PushOutcome(StrictModel):
    """What became of one rollout of a push."""

    rollout_id: str | None
    outcome: Literal["new", "duplicate", "refused"]
    reason: str | None = None


class PushReply(StrictModel):
    """One outcome per item, in order. `latest_version` and `run_state` ride along for searchers."""

    outcomes: list[PushOutcome]
    latest_version: VersionText | None
    run_state: RunState


class EvalResult(StrictModel):
    """The rewards of one evaluation lease; None is an unknown score (counted, never 0)."""

    lease_id: Name
    rewards: list[float | None]
    num_response_tokens: list[int]


class EvalResults(StrictModel):
    """POST /v1/evals/{eval_id}/results."""

    searcher_id: Name
    version: VersionText
    results: list[EvalResult]


class EvalRequest(StrictModel):
    """POST /v1/evals: evaluate an announced version on held-out prompts. Idempotent by version and kind."""

    version: VersionText
    token: Name
    num_prompts: int = Field(ge=1, le=10_000)
    num_samples: int = Field(ge=1, le=4096)
    success_reward: FiniteFloat
    timeout_s: float = Field(gt=0, allow_inf_nan=False)


class EvalInfo(StrictModel):
    """One evaluation. Accuracies are None until done; unknown scores are left out of the mean and counted."""

    eval_id: str
    version: VersionText
    state: Literal["pending", "done", "expired"]
    num_prompts: int
    num_done: int
    accuracy: float | None = None
    greedy_accuracy: float | None = None
    mean_reward: float | None = None
    mean_response_tokens: float | None = None
    num_unknown: int = 0
    created_at_s: float
    finished_at_s: float | None = None


class LineageRequest(StrictModel):
    """POST /v1/lineages: a trainer starts. `parent` is the version it starts from."""

    trainer_id: Name
    parent: VersionText


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
    lineage: int
    step: int = Field(ge=1)
    token: Name
    wait_s: float = Field(default=0.0, ge=0, le=60)


class AckRequest(StrictModel):
    """POST /v1/batches/{batch_id}/ack: step (lineage, step) consumed the batch; `metrics` go to the ledger."""

    lineage: int
    step: int = Field(ge=1)
    token: Name
    metrics: dict[Name, float | None] = Field(default_factory=dict)
    policy_ages: list[int] = Field(default_factory=list)


class LedgerEntry(StrictModel):
    """One line of the ledger."""

    lineage: int
    step: int
    batch_id: str
    acked_at_s: float
    num_rollouts: int
    rollout_ids: list[str]
    metrics: dict[str, float | None]
    abandoned: bool


class LedgerReply(StrictModel):
    """GET /v1/ledger?after=N&limit=N; `next` is None at the end."""

    entries: list[LedgerEntry]
    next: int | None


class WaitInfo(StrictModel):
    """Who waits for what since when, until when at most."""

    owner: str
    name: str
    for_s: float
    deadline_in_s: float


class ComponentInfo(StrictModel):
    """One component as its last heartbeat showed it."""

    component_id: str
    kind: str
    state: str
    version: VersionText | None
    alive: bool
    heartbeat_age_s: float
    gauges: dict[str, float]


class RunInfo(StrictModel):
    """GET /v1/run."""

    run: str
    state: RunState
    state_reason: str | None
    step: int
    lineage: int
    parents: dict[int, VersionText]
    latest_version: VersionText | None
    checkpoint: VersionText | None
    checkpoint_key: str | None
    components: list[ComponentInfo]
    waits: list[WaitInfo]
    evals: list[EvalInfo]


class RunCommand(StrictModel):
    """POST /v1/run/{pause,resume,stop,done,fail}; reason is shown to people. `token`: done and fail only."""

    reason: str | None = Field(default=None, max_length=10_000)
    token: Name | None = None


class Stats(StrictModel):
    """GET /v1/stats."""

    run: str
    num_rollouts: int
    num_scored: int
    num_pending: int
    num_failed: int
    num_prompts_train: int
    num_prompts_heldout: int
    num_prompts_seen: int
    payload_bytes: int
    log_position: int
    num_marks: int
    pushed: dict[str, int]
    refused: dict[str, int]
    evicted: dict[str, int]
    leases: dict[str, int]
    rollouts_generated: int
    rollouts_drawn: int
    rollouts_trained: int
    samples_per_insert: float | None
    slots: dict[str, int]
    realised_most_on_policy: float | None
    mean_reward_recent: float | None
    policy_age_histogram: dict[int, int]


class ScoreItem(StrictModel):
    """One completion to score."""

    item_id: Name
    task: Name
    prompt: str = Field(max_length=1_000_000)
    response: str = Field(max_length=1_000_000)
    data: dict[str, Any] = Field(default_factory=dict)
    finish_reason: str = "stop"


class ScoreRequest(StrictModel):
    """POST /v1/score."""

    items: list[ScoreItem] = Field(min_length=1)


class ScoreError(StrictModel):
    """Why there is no score. Never a number."""

    reason: Literal["unknown_task", "bad_data", "timeout", "exception", "not_finite"]
    detail: str


class ScoreResult(StrictModel):
    """Exactly one of `reward` and `error`."""

    item_id: str
    reward: float | None = Field(default=None, allow_inf_nan=False)
    reward_version: str | None = None
    error: ScoreError | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ScoreResult:
        if (self.reward is None) == (self.error is None):
            raise ValueError("a score result holds a reward or an error, never both and never neither")
        return self


class ScoreReply(StrictModel):
    """One result per item, in order."""

    results: list[ScoreResult]


class RewardInfo(StrictModel):
    """One task that the reward service scores. `fast` rewards run inline, the others in killable workers."""

    task: str
    version: str
    fast: bool
    health: str


class RewardsReply(StrictModel):
    """GET /v1/rewards."""

    rewards: list[RewardInfo]
