"""Rollouts over REST: the reply to a push, and stored rollouts for people."""

from __future__ import annotations

from typing import Literal

from tba.fields import RunState, StrictModel, VersionText

RolloutOrder = Literal["best", "worst", "newest", "oldest"]
RewardStatus = Literal["scored", "pending", "failed"]


class PushOutcome(StrictModel):
    """The outcome of one rollout of a push."""

    rollout_id: str | None
    outcome: Literal["new", "duplicate", "refused"]
    reason: str | None = None


class PushReply(StrictModel):
    """One outcome per item, in order. `latest_version` and `run_state` are for searchers."""

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
    sampling: SamplingInfo
    searcher_id: str
    started_at_s: float
    finished_at_s: float


class RolloutPage(StrictModel):
    """GET /v1/rollouts. Send `next` as `cursor` for the page after this one; it is None at the end."""

    rollouts: list[RolloutInfo]
    next: str | None


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
