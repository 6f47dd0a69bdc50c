"""The reward service (scores, errors, tasks), and the job that scores stored rollouts again."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from tba.api.prompts import PromptData
from tba.api.run import WaitInfo
from tba.fields import MAX_NUMBER, Name, StrictModel, is_bounded
from tba.wire.rollout import FinishReason

MAX_SCORE_ITEMS = 1024
"""Most completions in one request. The service refuses more, and both clients of it cut their requests there."""
MAX_SCORE_BODY_BYTES = 16 * 1024 * 1024
"""Most bytes of one request; likewise."""
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
"""Reasons that may have been chance: a retry is worth it."""
ANSWER_REASONS: frozenset[ScoreReason] = frozenset({"ambiguous", "out_of_memory", "too_long", "too_slow"})
"""Reasons that the response causes, and neither the rule nor the prompt's data."""
HANG_REASONS: frozenset[ScoreReason] = frozenset({"timeout", "too_slow"})
"""Reasons that one item may keep all others waiting for."""
AWAY_REASONS: frozenset[ScoreReason] = frozenset({"unreachable"})
"""Reasons that say nothing about the item: its scorer is away. The item is pending, not failed, and is scored later."""


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
STARTING = "it is starting"
"""Health of a scorer until its first attempt to start has ended; later texts say what is wrong."""


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
    """Why there is no score. Never a number."""

    reason: ScoreReason
    detail: str


def reward_error(reward: object) -> ScoreError | None:
    """Return why a number cannot be a reward; None if it can, and for what is no number."""
    if not isinstance(reward, int | float) or isinstance(reward, bool) or is_bounded(reward):
        return None
    if isinstance(reward, float) and not math.isfinite(reward):
        return ScoreError(reason="not_finite", detail=f"the reward is {reward}")
    # a whole number of thousands of digits is not written out
    return ScoreError(reason="too_large", detail=f"the reward is not from -{MAX_NUMBER:g} to {MAX_NUMBER:g}")


class ScoreResult(StrictModel):
    """Exactly one of `reward` and `error`.

    A reward that is no bounded number (tba/fields.py) is read as an error, so that it costs no other item of the reply.
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
    """`ok`; `idle` until the first item starts the scorer; or a text that says what is wrong."""
    scorers: list[ScorerInfo] = Field(default_factory=list)


class RewardsReply(StrictModel):
    """GET /v1/rewards."""

    rewards: list[RewardInfo]


RescoreOnly = Literal["all", "scored", "failed", "pending"]
RescoreState = Literal["running", "done"]


class RescoreRequest(StrictModel):
    """POST /v1/rescore: score the stored rollouts again: all, or those of one task or one reward status."""

    task: Name | None = None
    only: RescoreOnly = "all"


class RescoreInfo(StrictModel):
    """GET /v1/rescore: the job that runs, or the last one.

    It takes the rollouts that are stored when it starts, oldest first; it ends when `num_done + num_gone == num_total`.
    """

    state: RescoreState
    task: str | None
    only: RescoreOnly
    started_at_s: float
    finished_at_s: float | None = None
    start_position: int
    """Log position at the start; the job leaves younger rollouts alone."""
    position: int = 0
    """Log position of the last rollout that is done."""
    num_total: int
    num_done: int = 0
    """Scored again; of these:"""
    num_changed: int = 0
    """have another reward than before, or one where there was none, or none where there was one."""
    num_failed: int = 0
    """could not be scored: their reward is unknown now."""
    num_gone: int = 0
    """Evicted before they were reached, or scored by somebody else in a job about pending ones."""
    num_known_before: int = 0
    num_known_after: int = 0
    mean_reward_before: float | None = None
    """Over the `num_known_before` rollouts that had a reward."""
    mean_reward_after: float | None = None
    """Over the `num_known_after` rollouts that have one now."""
    reward_versions: dict[str, int] = Field(default_factory=dict)
    """Version of the reward -> rollouts it has scored."""
    wait: WaitInfo | None = None
    problem: str | None = None
    """Why the reward service cannot be asked now."""
