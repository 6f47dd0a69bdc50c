"""The section of a recipe about the number of searchers: who starts and stops them while the run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tba.config.base import StrictModel


class ScalingSection(StrictModel):
    """What `PATCH /v1/run/searchers` (`tba scale`) acts through."""

    backend: Literal["none", "local", "kubernetes"] = "none"
    """`none`: searchers are started and stopped by other means, and a request to scale is refused with a word on how.
    `local`: by `tba run`, which sets this itself. `kubernetes`: the buffer service sets the replicas of one Deployment
    (`pip install -e './services/buffer[kubernetes]'`)."""
    deployment: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
    """Name of the Deployment of the searchers."""
    namespace: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    """Its namespace; none: that of the buffer's own pod."""
    num_searchers: int | None = Field(default=None, ge=1, le=100_000)
    """With `kubernetes`: how many there are while no operator wants another number, for a Deployment that names none
    (the chart's, since two writers of `spec.replicas` would fight over it); none: what the Deployment says itself."""
    max_searchers: int = Field(default=64, ge=1, le=100_000)
    """More are refused: a slip of the finger should not rent a cluster."""
    reconcile_s: float = Field(default=5.0, gt=0, le=3600)
    """How often the replicas are compared with what is wanted, and set again if something else has changed them."""
    release_when_over: bool = True
    """Set the Deployment to 0 replicas when the run is done or has failed, so that GPUs are not kept for nothing; a
    trainer that goes on with the run brings them back."""

    @model_validator(mode="after")
    def _check(self) -> ScalingSection:
        if self.backend == "kubernetes" and self.deployment is None:
            raise ValueError(
                'backend = "kubernetes" needs the name of the Deployment of the searchers; give scaling.deployment'
            )
        if self.num_searchers is not None and self.num_searchers > self.max_searchers:
            raise ValueError(
                f"num_searchers is {self.num_searchers}, above max_searchers {self.max_searchers}; raise that one too"
            )
        return self
