"""Schedules: a number as a function of the optimizer step, as small named objects."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from tba.config.base import StrictModel


class Schedule(StrictModel):
    """A value that depends on the optimizer step.

    `constant`: value. `linear`, `cosine`: from `value` to `final` over `steps`. `wsd`: warm up from 0 over
    `warmup_steps`, stay at `value` until `steps - decay_steps`, then half a cosine to `final`. Every kind may warm up.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape."""
    value: float = Field(ge=0)
    """Value at the start, after warm-up."""
    final: float = Field(default=0.0, ge=0)
    """Value at the end (not for constant)."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps from start to end (not for constant)."""
    warmup_steps: int = Field(default=0, ge=0)
    """The first steps rise linearly from 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Length of the decay (wsd only)."""

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.kind != "constant" and self.steps is None:
            raise ValueError(f"a {self.kind} schedule needs `steps`, the optimizer steps from start to end")
        if self.kind == "wsd" and not 0 < self.decay_steps <= (self.steps or 0):
            raise ValueError(f"a wsd schedule needs 0 < decay_steps <= steps, got {self.decay_steps}")
        return self

    def at(self, step: int) -> float:
        """The value at optimizer step `step` (0 is the first)."""
        if step < self.warmup_steps:
            return self.value * (step + 1) / self.warmup_steps
        if self.kind == "constant" or self.steps is None:
            return self.value
        if self.kind == "wsd":
            start, length = self.steps - self.decay_steps, self.decay_steps
        else:
            start, length = self.warmup_steps, max(1, self.steps - self.warmup_steps)
        done = min(1.0, max(0.0, (step - start) / length))
        if self.kind == "linear":
            return self.value + (self.final - self.value) * done
        return self.final + (self.value - self.final) * 0.5 * (1 + math.cos(math.pi * done))
