"""Evaluations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.api.base import Integer, Name, Number, VersionText
from tba.config.base import StrictModel


class EvalResult(StrictModel):
    """The rewards of one evaluation lease; None is an unknown score (counted, never 0)."""

    lease_id: Name
    rewards: list[Number | None]
    num_response_tokens: list[Integer]


class EvalResults(StrictModel):
    """POST /v1/evals/{eval_id}/results."""

    searcher_id: Name
    version: VersionText
    results: list[EvalResult]


class EvalRequest(StrictModel):
    """POST /v1/evals: evaluate an announced version on held-out prompts. Idempotent by version and kind."""

    version: VersionText
    token: Name
    num_prompts: Integer = Field(ge=1, le=10_000)
    num_samples: Integer = Field(ge=1, le=4096)
    success_reward: Number
    timeout_s: Number = Field(gt=0)


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
