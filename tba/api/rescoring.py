"""Scoring what is stored again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.api.base import Name
from tba.api.run import WaitInfo
from tba.config.base import StrictModel

RescoreOnly = Literal["all", "scored", "failed", "pending"]
RescoreState = Literal["running", "done", "cancelled"]


class RescoreRequest(StrictModel):
    """POST /v1/rescore: score the stored rollouts again, those of one task or one reward status if it is given."""

    task: Name | None = None
    only: RescoreOnly = "all"


class RescoreInfo(StrictModel):
    """GET /v1/rescore: the job that runs, or the last one.

    It takes what is stored when it starts, oldest first; it is over when `num_done + num_gone == num_total`.
    """

    state: RescoreState
    task: str | None
    only: RescoreOnly
    started_at_s: float
    finished_at_s: float | None = None
    start_position: int
    """Log position at the start; younger rollouts are not its business."""
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
    """Evicted before they were reached."""
    num_known_before: int = 0
    num_known_after: int = 0
    mean_reward_before: float | None = None
    """Over the `num_known_before` rollouts that had a reward."""
    mean_reward_after: float | None = None
    """Over the `num_known_after` rollouts that have one now."""
    reward_versions: dict[str, int] = Field(default_factory=dict)
    """Version of the reward -> rollouts that it has scored."""
    wait: WaitInfo | None = None
    problem: str | None = None
    """Why the reward service could not be asked, while that is so."""

    def is_for(self, request: RescoreRequest) -> bool:
        """Whether `request` asks for this job."""
        return (self.task, self.only) == (request.task, request.only)
