"""Rollouts over REST: the reply to a push, and stored rollouts for people."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tba.fields import RunState, StrictModel, VersionText

RolloutOrder = Literal["best", "worst", "newest", "oldest"]
RewardStatus = Literal["scored", "pending", "failed"]
EVICTED_KEY = "tba.num_evicted"
"""Key in the file metadata of GET /v1/rollouts.parquet: how many rollouts were evicted before they were read."""


class PushOutcome(StrictModel):
    """The outcome of one rollout of a push."""

    rollout_id: str | None
    outcome: Literal["new", "duplicate", "refused"]
    reason: str | None = None


class PushReply(StrictModel):
    """One outcome per item, in order. `latest_version` and `run_state` are for searchers, as in a lease reply."""

    outcomes: list[PushOutcome]
    latest_version: VersionText | None
    run_state: RunState


class SpanInfo(StrictModel):
    """Response tokens [start, end) were sampled by `version`."""

    version: VersionText
    start: int
    end: int


class SamplingInfo(StrictModel):
    """The behaviour policy's settings; temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[str]


class RewardPart(StrictModel):
    """The score of one scorer of the task, before weights."""

    name: str
    score: float
    weight: float | None
    """Its weight in the recipe of the buffer service; None: the recipe has no such scorer (now)."""


class TrainedStep(StrictModel):
    """An optimizer step that consumed a rollout."""

    version: VersionText
    """The version that the step made: (lineage, step)."""
    at_s: float
    """When it was acked, Unix seconds."""
    advantage: float | None
    """A_j of the rollout in that step; None: the objective has none."""
    weight: float | None
    """Mean weight of its tokens in that step; None: no pass was made for it, since it added nothing to the gradient."""
    skipped: str | None
    """Why the step left the weights as they were."""
    abandoned: bool
    """A resume continued from an earlier step, so the active lineage does not have this one."""


class RolloutInfo(StrictModel):
    """One stored rollout without its arrays. Times are Unix seconds."""

    rollout_id: str
    task: str
    prompt_id: str
    visit_id: str
    version: VersionText
    """The oldest version that made a token of it: policy age is measured from there."""
    version_spans: list[SpanInfo]
    policy_age_steps: int
    """Optimizer steps between `version` and the active lineage now."""
    prompt_text: str | None
    """Cut to the same limit as the response text; None: the run no longer has the prompt."""
    prompt_data: dict[str, Any] | None = None
    """What the scorer gets beside the text, such as the gold answer; None: the run no longer has the prompt, or in a
    page it is longer than texts may be."""
    num_prompt_tokens: int
    num_response_tokens: int
    response_text: str
    response_text_cut: bool
    """Whether `response_text` is only the beginning."""
    finish_reason: str
    reward: float | None
    reward_status: RewardStatus
    reward_reason: str | None
    reward_version: str | None
    reward_parts: list[RewardPart] | None = None
    """None: the reward is the score of the only scorer, or there is no score."""
    num_batches: int = 0
    """Batches that drew it, and that are neither void nor abandoned."""
    sampling: SamplingInfo
    searcher_id: str
    started_at_s: float
    finished_at_s: float


class RolloutPage(StrictModel):
    """GET /v1/rollouts. Send `next` as `cursor` for the page after this one; it is None at the end.

    With a filter that the index does not hold (`searcher_id`, `finish_reason`, `contains`) a request reads at most
    20,000 rollouts: then a page may hold fewer than `limit`, even none, and `next` continues behind the last one read.
    """

    rollouts: list[RolloutInfo]
    next: str | None
    num_read: int = 0
    """Stored rollouts that were read for this page."""


class RefLogprobInfo(StrictModel):
    """Sum of the reference's log-probs over the response, and the reference version it was computed under."""

    value: float
    version: VersionText


class RolloutDetail(RolloutInfo):
    """GET /v1/rollouts/{rollout_id}: all stored fields of one rollout."""

    prompt_tokens: list[int]
    response_tokens: list[int]
    sampler_logprobs: list[float]
    ref_logprob: RefLogprobInfo | None
    token_texts: list[str] | None = None
    """The text that each response token adds; None: this service has no tokenizer of the model."""
    trained: list[TrainedStep] = Field(default_factory=list)
    """The kept steps that consumed it, oldest first."""
    trained_since: VersionText | None = None
    """The oldest step whose advantages are kept; the ledger has older ones, without. None: no step is kept."""
