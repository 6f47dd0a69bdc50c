"""Bodies of the reward service (scores, errors, tasks), and of the buffer's re-scoring job."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from tba.api.prompts import PromptData
from tba.api.run import WaitInfo
from tba.fields import MAX_NUMBER, Name, StrictModel, is_bounded
from tba.wire.sequences import FinishReason

MAX_SCORE_ITEMS = 1024
"""Most completions in one request. The service refuses more; searcher and buffer split larger requests."""
MAX_SCORE_BODY_BYTES = 16 * 1024 * 1024
"""Most bytes of one request. The service refuses more; searcher and buffer split larger requests."""
ScoreReason = Literal[
    "abstained",
    "ambiguous",
    "bad_data",
    "crashed",
    "exception",
    "malformed",
    "not_finite",
    "out_of_memory",
    "timeout",
    "too_large",
    "too_long",
    "too_slow",
    "unknown_task",
    "unreachable",
]
"""Reasons why a score is unknown (docs/rewards.md)."""
TRANSIENT_REASONS: frozenset[ScoreReason] = frozenset({"crashed", "out_of_memory", "timeout", "unreachable"})
"""Reasons that may be transient, so that a retry may succeed."""
ANSWER_REASONS: frozenset[ScoreReason] = frozenset({"ambiguous", "out_of_memory", "too_long", "too_slow"})
"""Reasons that lie in the response itself, not in the scoring rule or the prompt's data."""
HANG_REASONS: frozenset[ScoreReason] = frozenset({"timeout", "too_slow"})
"""Reasons after which one item may have kept the other items of its request waiting."""
AWAY_REASONS: frozenset[ScoreReason] = frozenset({"unreachable"})
"""Reasons that mean that the scorer does not answer. The item then stays pending, and is scored later."""


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
STARTING = "it is starting"
"""Health text of a scorer until its first attempt to start has ended."""


class ScoreItem(StrictModel):
    """One completion to score."""

    item_id: Name
    task: Name
    prompt: str
    response: str
    data: PromptData = Field(default_factory=dict)
    finish_reason: str = Field(default="stop", pattern=f"^({'|'.join(get_args(FinishReason))})$")
    response_tokens: list[TokenId] | None = None
    """The response as token ids; sent for tasks with a Python function (`RewardSection.takes_tokens`)."""


class ScoreRequest(StrictModel):
    """POST /v1/score."""

    items: list[ScoreItem] = Field(min_length=1)


class ScoreError(StrictModel):
    """The reason why an item has no score."""

    reason: ScoreReason
    detail: str


def reward_error(reward: object) -> ScoreError | None:
    """Return the error for a number that is NaN, infinite or too large for a reward; None for any other value."""
    if not isinstance(reward, int | float) or isinstance(reward, bool) or is_bounded(reward):
        return None
    if isinstance(reward, float) and not math.isfinite(reward):
        return ScoreError(reason="not_finite", detail=f"the reward is {reward}")
    # a whole number of thousands of digits is not written out
    return ScoreError(reason="too_large", detail=f"the reward is not from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")


class ScoreResult(StrictModel):
    """The result of one item: either `reward` or `error`.

    A reward that is NaN, infinite or beyond MAX_NUMBER is read as an error, so that the rest of the reply stays valid.
    """

    item_id: str
    reward: float | None = Field(default=None, ge=-MAX_NUMBER, le=MAX_NUMBER)
    reward_version: str | None = None
    parts: dict[str, float] | None = None
    """The known scores that make up the reward, by scorer name, before weights."""
    error: ScoreError | None = None

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if isinstance(parts := value.get("parts"), dict):
            value = {**value, "parts": {name: score for name, score in parts.items() if reward_error(score) is None}}
        error = reward_error(value.get("reward"))
        return value if error is None else {**value, "reward": None, "error": error}

    @model_validator(mode="after")
    def _exactly_one(self) -> ScoreResult:
        # a reward beside an error would be trained on, and nothing at all would wait for ever
        if (self.reward is None) == (self.error is None):
            raise ValueError("a score result holds either a reward or an error")
        return self


class ScoreReply(StrictModel):
    """Reply to POST /v1/score: one result per item, in the order of the request."""

    results: list[ScoreResult]


class ScorerInfo(StrictModel):
    """One scorer of a task, which gives one part of the reward."""

    name: str
    kind: str
    weight: float
    gate: float | None = None
    version: str
    health: str


class RewardInfo(StrictModel):
    """One task that the reward service scores."""

    task: str
    version: str
    health: str
    """`ok`; `idle` before the first item, which starts the scorer; or a sentence about the problem."""
    scorers: list[ScorerInfo] = Field(default_factory=list)


class RewardsReply(StrictModel):
    """GET /v1/rewards."""

    rewards: list[RewardInfo]


RescoreOnly = Literal["all", "scored", "failed", "pending"]
RescoreState = Literal["running", "done"]


class RescoreRequest(StrictModel):
    """POST /v1/rescore: score stored rollouts again, all of them or only one task or reward status."""

    task: Name | None = None
    only: RescoreOnly = "all"


class RescoreInfo(StrictModel):
    """GET /v1/rescore: the re-scoring job that is running, or else the last one.

    A job scores the rollouts that are stored when it starts, oldest first, until `num_done + num_gone == num_total`.
    """

    state: RescoreState
    task: str | None
    only: RescoreOnly
    started_at_s: float
    finished_at_s: float | None = None
    start_position: int
    """Log position at the start of the job; it does not score later rollouts."""
    position: int = 0
    """Log position of the last rollout that the job has handled."""
    num_total: int
    num_done: int = 0
    """Rollouts scored again so far."""
    num_changed: int = 0
    """Rollouts scored again whose reward differs from before: another number, newly known, or no longer known."""
    num_failed: int = 0
    """Rollouts scored again whose scoring failed, so that their reward is unknown now."""
    num_gone: int = 0
    """Rollouts that were evicted before their turn or, in a job about pending ones, scored by somebody else."""
    num_known_before: int = 0
    num_known_after: int = 0
    mean_reward_before: float | None = None
    """Mean over the `num_known_before` rollouts that had a reward before."""
    mean_reward_after: float | None = None
    """Mean over the `num_known_after` rollouts that have a reward now."""
    reward_versions: dict[str, int] = Field(default_factory=dict)
    """Version of the reward -> number of rollouts that it has scored."""
    wait: WaitInfo | None = None
    problem: str | None = None
    """Why the reward service cannot be reached now; None: it can."""
