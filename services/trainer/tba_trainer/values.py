"""The numbers that may change from step to step: the recipe's schedules, and what was changed while the run goes on.

    recipe ----------------------+
                                 +--> Values.at(step) --> learning rate and beta of the step
    GET /v1/run/settings --------+        (again only when a reply of the buffer told another revision)

A change holds for a whole step: it is looked for when a step begins, never within one. The ack of the step carries the
revision that the step was made with, so the audit says exactly from which step on a change was in effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tba.api import SettingsInfo, SettingsRequest
from tba.config import LiveSettings, Recipe, with_live
from tba.errors import ConflictError, FencedError
from tba.logs import get_logger

ATTEMPTS = 8
"""Changes of others that may come between the reading of the settings and a change."""
NO_CHANGES_READ = 2**53 - 1
"""As `after` of the settings: the trainer needs what holds, not who changed it."""
log = get_logger("values")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """What one optimizer step is made with."""

    learning_rate: float
    beta: float


def scheduled(recipe: Recipe, *, step: int) -> StepValues:
    """The recipe's values for optimizer step `step` (1 is the first)."""
    return StepValues(learning_rate=recipe.trainer.learning_rate.at(step - 1), beta=recipe.objective.beta.at(step - 1))


class SettingsDoor(Protocol):
    """The part of BufferClient that live settings come through."""

    @property
    def settings_revision(self) -> int:
        """The revision that the last reply told."""
        ...

    def settings(self, *, after: int = 0) -> SettingsInfo:
        """What holds now."""
        ...

    def change_settings(self, request: SettingsRequest) -> SettingsInfo:
        """Change some of them."""
        ...


class Values:
    """The values of each step, live changes included.

    Args:
        recipe: as the run was started with.
        door: the buffer.
    """

    def __init__(self, recipe: Recipe, door: SettingsDoor) -> None:
        self._of_run, self._door = recipe, door
        self._recipe = recipe
        self._revision: int | None = None
        self._step = 1

    @property
    def revision(self) -> int:
        """The revision that the values of the step in progress belong to; 0: nothing was ever changed."""
        return self._revision or 0

    @property
    def eval_every_steps(self) -> int:
        """Optimizer steps between evaluations."""
        return self._recipe.eval.every_steps

    def at(self, step: int) -> StepValues:
        """The values of optimizer step `step`, which begins now.

        Raises:
            ServiceError: the settings have changed and cannot be read.
            ConfigError: the live settings do not go with this trainer's recipe.
        """
        if self._revision is None or self._revision != self._door.settings_revision:
            self._take(self._door.settings(after=NO_CHANGES_READ))
        self._step = step
        return scheduled(self._recipe, step=step)

    def lower_rate(self, factor: float, *, token: str, reason: str) -> float:
        """Multiply the learning rate, its whole schedule, by `factor`; holds from the next step on. Once for the step
        in progress: where a resume repeats that step, nothing more is changed.

        Args:
            token: fencing token of the lineage.
            reason: for the audit.

        Returns:
            The learning rate of the next step.

        Raises:
            FencedError: a newer lineage owns the run.
            ServiceError: the buffer is away, or does not allow it; nothing was changed.
        """

        def lowered(recipe: Recipe) -> LiveSettings:
            rate = recipe.trainer.learning_rate
            scaled = rate.model_copy(update={"value": rate.value * factor, "final": rate.final * factor})
            return LiveSettings(learning_rate=scaled)

        return self._change("lower_rate", lowered, token, reason).trainer.learning_rate.at(self._step)

    def raise_m(self, by: float, *, token: str, reason: str) -> float:
        """Draw more recent data: m, its whole schedule, rises by `by`, to 1 at most, from the next batch drawn on. Once
        for the step in progress, as `lower_rate`.

        Args:
            token: fencing token of the lineage.
            reason: for the audit.

        Returns:
            The m of the next step.

        Raises:
            FencedError: a newer lineage owns the run.
            ServiceError: the buffer is away, or does not allow it; nothing was changed.
        """

        def raised(recipe: Recipe) -> LiveSettings | None:
            m = recipe.sampling.most_on_policy_prob
            ends = ("value",) if m.kind == "constant" else ("value", "final")
            higher = m.model_copy(update={end: min(1.0, getattr(m, end) + by) for end in ends})
            return None if higher == m else LiveSettings(most_on_policy_prob=higher)

        return self._change("raise_m", raised, token, reason).sampling.most_on_policy_prob.at(self._step)

    def _change(self, action: str, change: Callable[[Recipe], LiveSettings | None], token: str, reason: str) -> Recipe:
        """Change what holds now, which others may have changed since the step in progress began, and go on doing.

        The request is named by action and step, not by lineage: the same step of a later start repeats it.

        Args:
            change: the new settings where the recipe with those of now is given; None: they stay.

        Returns:
            The recipe with the settings after it.
        """
        info = self._door.settings(after=NO_CHANGES_READ)
        for attempt in range(1, ATTEMPTS + 1):
            recipe = with_live(self._of_run, info.settings)
            if (settings := change(recipe)) is None:
                return recipe
            request = SettingsRequest(
                settings=settings,
                reason=reason,
                token=token,
                revision=info.revision,
                request_id=f"guard-{action}-{self._step}",
            )
            try:
                return with_live(self._of_run, self._door.change_settings(request).settings)
            except FencedError:
                raise
            except ConflictError:
                newer = self._door.settings(after=NO_CHANGES_READ)
                if newer.revision == info.revision or attempt == ATTEMPTS:
                    raise
                info = newer
        raise AssertionError("the last attempt returns or raises")

    def _take(self, info: SettingsInfo) -> None:
        self._recipe = with_live(self._of_run, info.settings)
        if info.revision != self.revision:
            log.info("settings_changed", revision=info.revision, **info.settings.model_dump(exclude_defaults=True))
        self._revision = info.revision
