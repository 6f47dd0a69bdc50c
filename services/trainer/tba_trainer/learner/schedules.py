"""The numbers that may change from step to step: the recipe's schedules, with the live changes of the run.

    recipe ----------------------+
                                 +--> Schedules.at(step) --> learning rate and beta of the step
    GET /v1/run/settings --------+        (read again only after a reply of the buffer had another revision)

A change holds for whole steps: settings are read when a step begins, never within one. The ack of a step carries the
revision that the step used, so the audit says from which step on a change was in effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from tba.clients import BufferClient
from tba.config import Recipe, with_live
from tba.logs import get_logger

NO_CHANGES_READ = 2**53 - 1
"""Value of `after` in a request for the settings: read the current values without the audit of their changes."""
log = get_logger("schedules")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """Learning rate and KL coefficient of one optimizer step."""

    learning_rate: float
    beta: float


def scheduled(recipe: Recipe, *, step: int) -> StepValues:
    """Return the recipe's values for optimizer step `step` (1 is the first)."""
    # a schedule counts finished steps: its value at 0 is that of the first step
    return StepValues(learning_rate=recipe.trainer.learning_rate.at(step - 1), beta=recipe.objective.beta.at(step - 1))


class Schedules:
    """The values of each step, live changes included."""

    def __init__(self, recipe: Recipe, client: BufferClient) -> None:
        self._base_recipe, self._client = recipe, client
        self._recipe = recipe
        self._revision: int | None = None

    @property
    def revision(self) -> int:
        """Revision of the values of the step in progress; 0: nothing was ever changed."""
        return self._revision or 0

    @property
    def eval_every_steps(self) -> int:
        """Optimizer steps between evaluations."""
        return self._recipe.eval.every_steps

    def at(self, step: int) -> StepValues:
        """Return the values of optimizer step `step`, which begins now.

        Raises:
            ServiceError: the settings have changed and cannot be read.
            ConfigError: the live settings do not fit this trainer's recipe.
        """
        # Replies of the buffer tell the revision in a header, so a step without a change costs no request.
        if self._revision is None or self._revision != self._client.settings_revision:
            info = self._client.settings(after=NO_CHANGES_READ)
            self._recipe = with_live(self._base_recipe, info.settings)
            if info.revision != self.revision:
                log.info("settings_changed", revision=info.revision, **info.settings.model_dump(exclude_defaults=True))
            self._revision = info.revision
        return scheduled(self._recipe, step=step)
