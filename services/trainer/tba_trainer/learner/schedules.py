"""The numbers that may change from step to step: the recipe's schedules, with the live changes of the run.

    recipe ----------------------+
                                 +--> Schedules.at(step) --> learning rate and beta of the step
    GET /v1/run/settings --------+        (again only when a reply of the buffer told another revision)

A change holds for whole steps: it is looked for when a step begins, never within one. The ack of the step carries the
revision that it used, so the audit says from which step on a change was in effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tba.api import SettingsInfo, SettingsRequest
from tba.config import LiveSettings, Recipe, with_live
from tba.errors import ConflictError, FencedError
from tba.logs import get_logger

MAX_ATTEMPTS = 8
"""Tries of one change; each but the last may lose against a change that somebody else makes at the same time."""
NO_CHANGES_READ = 2**53 - 1
"""As `after` of the settings: return the current values without the audit of who changed them."""
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


class LiveSettingsClient(Protocol):
    """The part of BufferClient that reads and changes live settings."""

    @property
    def settings_revision(self) -> int:
        """The revision that the last reply told."""
        ...

    def settings(self, *, after: int = 0) -> SettingsInfo:
        """Return the current settings."""
        ...

    def change_settings(self, request: SettingsRequest) -> SettingsInfo:
        """Change some of the settings."""
        ...


class Schedules:
    """The values of each step, live changes included.

    Args:
        recipe: as the run was started with.
        client: reaches the buffer.
    """

    def __init__(self, recipe: Recipe, client: LiveSettingsClient) -> None:
        self._base_recipe, self._client = recipe, client
        self._recipe = recipe
        self._revision: int | None = None
        self._step = 1

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
            self._take_over(self._client.settings(after=NO_CHANGES_READ))
        self._step = step
        return scheduled(self._recipe, step=step)

    def lower_learning_rate(self, factor: float, *, token: str, reason: str) -> float:
        """Multiply the whole schedule of the learning rate by `factor`, from the next step on.

        This happens once for the step in progress: a resume that repeats the step changes nothing more.

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
            # both ends: a decay that has already begun keeps its shape
            scaled = rate.model_copy(update={"value": rate.value * factor, "final": rate.final * factor})
            return LiveSettings(learning_rate=scaled)

        # request ids are stored in the buffer, so they keep the older names of the two actions
        return self._change("guard-lower_rate", lowered, token, reason).trainer.learning_rate.at(self._step)

    def raise_most_on_policy_prob(self, by: float, *, token: str, reason: str) -> float:
        """Raise the most-on-policy probability by `by`, to 1 at most, from the next draw on.

        This happens once for the step in progress, with the arguments and errors of `lower_learning_rate`.

        Returns:
            The probability from now on.
        """

        def raised(recipe: Recipe) -> LiveSettings | None:
            m = recipe.sampling.most_on_policy_prob
            higher = min(1.0, m + by)
            # at 1 already: an empty change would still be an entry of the audit
            return None if higher == m else LiveSettings(most_on_policy_prob=higher)

        return self._change("guard-raise_m", raised, token, reason).sampling.most_on_policy_prob

    def _change(self, action: str, change: Callable[[Recipe], LiveSettings | None], token: str, reason: str) -> Recipe:
        """Change the current settings, which others may have changed since the step in progress began.

        Args:
            change: returns the new settings, given the recipe with the current ones; None: they stay.

        Returns:
            The recipe with the settings after the change.
        """
        info = self._client.settings(after=NO_CHANGES_READ)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            recipe = with_live(self._base_recipe, info.settings)
            if (settings := change(recipe)) is None:
                return recipe
            request = SettingsRequest(
                settings=settings,
                reason=reason,
                token=token,
                revision=info.revision,
                # by step, not by lineage: the same step of a later start repeats this request and changes nothing
                request_id=f"{action}-{self._step}",
            )
            try:
                return with_live(self._base_recipe, self._client.change_settings(request).settings)
            except FencedError:  # a ConflictError too, but no newer revision would help
                raise
            except ConflictError:
                newer = self._client.settings(after=NO_CHANGES_READ)
                # the same revision: nobody else's change was in the way, so another try would fail as well
                if newer.revision == info.revision or attempt == MAX_ATTEMPTS:
                    raise
                info = newer
        raise AssertionError("the last attempt returns or raises")

    def _take_over(self, info: SettingsInfo) -> None:
        self._recipe = with_live(self._base_recipe, info.settings)
        if info.revision != self.revision:
            log.info("settings_changed", revision=info.revision, **info.settings.model_dump(exclude_defaults=True))
        self._revision = info.revision
