"""The reward service: scores, errors, tasks."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from tba.api.base import Name
from tba.config.base import StrictModel
from tba.numbers import MAX_NUMBER, is_bounded
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
    "too_large",
    "too_long",
    "too_slow",
    "unknown_task",
    "unreachable",
]
"""Why a score is unknown; docs/rewards.md says what each means."""
TRANSIENT_REASONS: frozenset[ScoreReason] = frozenset({"crashed", "out_of_memory", "timeout", "unreachable"})
"""Those that may have been chance: it is worth asking again."""
ANSWER_REASONS: frozenset[ScoreReason] = frozenset({"ambiguous", "out_of_memory", "too_long", "too_slow"})
"""Those that a response causes, where neither the rule nor the prompt's data is to blame (setting `unreadable`)."""
AWAY_REASONS: frozenset[ScoreReason] = frozenset({"unreachable"})
"""Those that say nothing of the item: what scores it is away. It is pending, not failed, and is asked for later."""


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
STARTING = "it is starting"
"""Health of a scorer before its first attempt to start has ended; what comes after it says what is wrong."""


class ScoreItem(StrictModel):
    """One completion to score."""

    item_id: Name
    task: Name
    prompt: str
    response: str
    data: dict[str, Any] = Field(default_factory=dict)
    finish_reason: str = Field(default="stop", pattern=f"^({'|'.join(get_args(FinishReason))})$")
    response_tokens: list[TokenId] | None = None
    """The response as token ids; sent for tasks with a Python function (`RewardSection.takes_tokens`)."""


class ScoreRequest(StrictModel):
    """POST /v1/score."""

    items: list[ScoreItem] = Field(min_length=1)


class ScoreError(StrictModel):
    """Why there is no score. Never a number."""

    reason: ScoreReason
    detail: str


def unusable(reward: object) -> ScoreError | None:
    """Why a number cannot be a reward; None for one that can, and for what is no number."""
    if not isinstance(reward, int | float) or isinstance(reward, bool) or is_bounded(reward):
        return None
    if isinstance(reward, float) and not math.isfinite(reward):
        return ScoreError(reason="not_finite", detail=f"the reward is {reward}")
    # a whole number of thousands of digits is not written out
    return ScoreError(reason="too_large", detail=f"the reward is not from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")


class ScoreResult(StrictModel):
    """Exactly one of `reward` and `error`. A reward that is no bounded number (tba/numbers.py) is read as an error: it
    costs its own item alone, and no other of a reply."""

    item_id: str
    reward: float | None = Field(default=None, ge=-MAX_NUMBER, le=MAX_NUMBER)
    reward_version: str | None = None
    parts: dict[str, float] | None = None
    """The known scores that the reward was made of, by the name of their scorer, before weights."""
    error: ScoreError | None = None

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if isinstance(parts := value.get("parts"), dict):
            value = {**value, "parts": {name: score for name, score in parts.items() if unusable(score) is None}}
        error = unusable(value.get("reward"))
        return value if error is None else {**value, "reward": None, "error": error}

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
