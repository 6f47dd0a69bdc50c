"""The reward service: scores, errors, tasks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tba.api.base import Name
from tba.config.base import StrictModel


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
