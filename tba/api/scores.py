"""The reward service: scores, errors, tasks."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from tba.api.base import Name
from tba.config.base import StrictModel
from tba.wire.document import FinishReason

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
    "too_long",
    "unknown_task",
    "unreachable",
]
"""Why a score is unknown; docs/rewards.md says what each means."""
TRANSIENT_REASONS: frozenset[ScoreReason] = frozenset({"crashed", "out_of_memory", "timeout", "unreachable"})
"""Those that may have been chance: it is worth asking again."""
AWAY_REASONS: frozenset[ScoreReason] = frozenset({"unreachable"})
"""Those that say nothing of the item: what scores it is away. It is pending, not failed, and is asked for later."""


class ScoreItem(StrictModel):
    """One completion to score."""

    item_id: Name
    task: Name
    prompt: str
    response: str
    data: dict[str, Any] = Field(default_factory=dict)
    finish_reason: str = Field(default="stop", pattern=f"^({'|'.join(get_args(FinishReason))})$")


class ScoreRequest(StrictModel):
    """POST /v1/score."""

    items: list[ScoreItem] = Field(min_length=1)


class ScoreError(StrictModel):
    """Why there is no score. Never a number."""

    reason: ScoreReason
    detail: str


class ScoreResult(StrictModel):
    """Exactly one of `reward` and `error`."""

    item_id: str
    reward: float | None = Field(default=None, allow_inf_nan=False)
    reward_version: str | None = None
    parts: dict[str, float] | None = None
    """The known scores that the reward was made of, by the name of their scorer, before weights."""
    error: ScoreError | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ScoreResult:
        if (self.reward is None) == (self.error is None):
            raise ValueError("a score result holds a reward or an error, never both and never neither")
        return self


class ScoreReply(StrictModel):
    """One result per item, in order."""

    results: list[ScoreResult]


class ScorerInfo(StrictModel):
    """One part of a task's reward."""

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
    """`ok`; `idle` where nothing has been asked yet and the first item starts it; or what is wrong."""
    scorers: list[ScorerInfo] = Field(default_factory=list)


class RewardsReply(StrictModel):
    """GET /v1/rewards."""

    rewards: list[RewardInfo]
