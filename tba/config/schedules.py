"""Schedules: numbers that depend on the optimizer step, and the types of settings that are bounded numbers."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from tba.fields import MAX_STEP, StrictModel


class Schedule(StrictModel):
    """A value that depends on the optimizer step.

    `constant`: always `value`. `linear`, `cosine`: from `value` to `final`, which is reached at step `steps`. `wsd`
    (warm-up, stable, decay): `value` until step `steps - decay_steps`, then half a cosine to `final`. With
    `warmup_steps`, every kind first rises linearly from 0 to `value`.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the schedule."""
    value: float = Field(ge=0)
    """Value after the warm-up, before any decay."""
    final: float = Field(default=0.0, ge=0)
    """Value from step `steps` on (not for constant)."""
    steps: int | None = Field(default=None, ge=1, le=MAX_STEP)
    """Optimizer step at which `final` is reached (not for constant)."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEP)
    """Number of first steps in which the value rises linearly from 0 to `value`."""
    decay_steps: int = Field(default=0, ge=0, le=MAX_STEP)
    """Number of steps of the decay, which ends at step `steps` (wsd only)."""

    @model_validator(mode="before")
    @classmethod
    def _of_number(cls, value: Any) -> Any:
        """Read a bare number as a constant schedule."""
        # a bool is an int in Python, and `true` is no number here
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"value": value}
        if not isinstance(value, dict | Schedule):
            raise ValueError("it takes a number such as 0.1, or a schedule { kind = ... }")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Let the JSON schema also allow a bare number."""
        found = super().__get_pydantic_json_schema__(schema, handler)
        if handler.mode == "validation":
            resolved = handler.resolve_ref_schema(found)
            whole = dict(resolved)
            resolved.clear()
            # editors check a recipe against this schema, and most recipes write a bare number
            number = {"type": "number", "minimum": 0, "description": "Constant."}
            resolved.update({"title": whole.pop("title"), "anyOf": [number, whole]})
        return found

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.kind != "constant" and self.steps is None:
            raise ValueError(f"a {self.kind} schedule needs `steps`, the optimizer steps from start to end")
        if self.kind == "wsd" and not 0 < self.decay_steps <= (self.steps or 0):
            raise ValueError(f"a wsd schedule needs 0 < decay_steps <= steps, got {self.decay_steps}")
        if self.kind != "wsd" and self.decay_steps:
            raise ValueError(f"decay_steps belongs to a wsd schedule, and this one is {self.kind}; remove it")
        if self.kind == "constant" and self.final:
            raise ValueError(
                f"a constant schedule has no final value (got {self.final:g}); name its kind (linear, cosine or wsd)"
            )
        # linear and cosine need one step of decay
        room = (self.steps or 0) - (self.decay_steps if self.kind == "wsd" else 1)
        if self.kind != "constant" and self.warmup_steps > room:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, and a {self.kind} schedule of {self.steps} steps has room for "
                f"{room} before its decay; raise steps or lower warmup_steps"
            )
        return self

    @property
    def highest(self) -> float:
        """The highest value at any step."""
        return self.value if self.kind == "constant" else max(self.value, self.final)

    def lowest(self, num_steps: int) -> float:
        """Return the lowest value at steps 0 to num_steps - 1."""
        # after the warm-up every kind goes one way, from `value` to `final`, so the lowest value is at an end
        return min(self.at(0), self.at(num_steps - 1))

    def at(self, step: int) -> float:
        """Return the value at optimizer step `step` (0 is the first)."""
        if step < self.warmup_steps:
            # +1: a warm-up that began at 0 would waste its first step
            return self.value * (step + 1) / self.warmup_steps
        if self.kind == "constant" or self.steps is None:
            return self.value
        if self.kind == "wsd":
            start, length = self.steps - self.decay_steps, self.decay_steps
        else:
            start, length = self.warmup_steps, self.steps - self.warmup_steps
        # beyond `steps` the value stays at `final`
        done = min(1.0, max(0.0, (step - start) / length))
        if self.kind == "linear":
            return self.value + (self.final - self.value) * done
        return self.final + (self.value - self.final) * 0.5 * (1 + math.cos(math.pi * done))


MAX_RATE, MAX_COEFFICIENT = 1e3, 1e6
"""Upper bounds: more than any run uses, and far below the values at which AdamW or the loss would overflow."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0


def _at_most(most: float, what: str, schedule: Schedule) -> Schedule:
    if schedule.highest > most:
        raise ValueError(f"{what} is at most {most:g}, and this one reaches {schedule.highest:g}; lower it")
    return schedule


Probability = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
LearningRate = Annotated[Schedule, AfterValidator(partial(_at_most, MAX_RATE, "a learning rate"))]
KlCoefficient = Annotated[Schedule, AfterValidator(partial(_at_most, MAX_COEFFICIENT, "a KL coefficient"))]
