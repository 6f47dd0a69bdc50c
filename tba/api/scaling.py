"""How many searchers a run has: what is wanted, who asked for it, and what became of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.api.base import Integer, Name, Reason
from tba.config.base import StrictModel
from tba.wire.ids import new_id

SearcherSource = Literal["operator", "recipe", "deployment", "run-over"]


class SearchersInfo(StrictModel):
    """The searchers as GET /v1/run shows them."""

    revision: int
    """Number of the last change that was asked for; 0: there was none."""
    wanted: int | None
    """How many there should be; null: nothing of tba starts or stops them (`scaling.backend = "none"`), or the
    Kubernetes API has not told yet."""
    source: SearcherSource | None
    """Who says so: an operator (`tba scale`), the recipe (`tba run`), the Deployment by itself (its chart, or whoever
    edited it), or the end of the run, which releases all."""
    alive: int
    """How many send heartbeats and have not ended."""
    backend: Literal["none", "local", "kubernetes"]
    note: str | None = None
    """What stands in the way, or what was done without being asked."""


class ScaleRequest(StrictModel):
    """PATCH /v1/run/searchers; null: the number of the recipe, or of the chart, again.

    The same request again (same `request_id`) changes nothing and is answered as the run is now.
    """

    num_searchers: Integer | None = Field(ge=0)
    reason: Reason | None = None
    request_id: Name = Field(default_factory=lambda: new_id("request"))


class ScaleReached(StrictModel):
    """When as many searchers as wanted were alive for the first time after a change."""

    at_s: float
    lineage: int
    step: int
    """The last acked step at that moment."""


class ScaleAudit(StrictModel):
    """One change: who, when, why, from how many to how many; null: as the recipe or the chart says."""

    revision: int
    at_s: float
    role: Literal["operator"]
    reason: str | None
    lineage: int
    step: int
    """The last acked step at the time."""
    old: int | None
    new: int | None
    reached: ScaleReached | None
    """Null: not so far, or another change came before."""


class ScalingInfo(StrictModel):
    """GET /v1/run/searchers?after=REVISION: the searchers, and the changes after a revision, oldest first."""

    searchers: SearchersInfo
    changes: list[ScaleAudit]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""
