"""The numbers that may change from step to step: learning rate and beta, as the recipe's schedules give them."""

from __future__ import annotations

from dataclasses import dataclass

from tba.config import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What one optimizer step is made with."""

    learning_rate: float
    beta: float


def scheduled(recipe: Recipe, *, step: int) -> StepValues:
    """The recipe's values for optimizer step `step` (1 is the first)."""
    return StepValues(learning_rate=recipe.trainer.learning_rate.at(step - 1), beta=recipe.objective.beta.at(step - 1))
