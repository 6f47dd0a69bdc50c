"""Live settings: what may change while a run goes on, who changed it, and when that took effect."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tba.api.base import Integer, Name, Reason
from tba.config.base import StrictModel
from tba.config.live import LIVE_NAMES, LiveName, LiveSettings
from tba.config.schedules import Schedule
from tba.wire.ids import new_id

Role = Literal["operator", "trainer"]
MAX_CHANGES_PER_PAGE = 1000
SETTINGS_HEADER = "tba-settings-revision"
"""Header of the replies to draws, acks and changes: the newest revision."""


class SettingsRequest(StrictModel):
    """PATCH /v1/run/settings: change the settings that `settings` names; null there is "as the recipe says" again.

    The same request again (same `request_id`) changes nothing and is answered as the run is now. A trainer gives its
    fencing `token`. With `revision` they change only while that is the newest one (409 otherwise): who computes new
    values from those that hold overwrites no change that comes between.
    """

    settings: LiveSettings
    reason: Reason | None = None
    token: Name | None = None
    revision: Integer | None = Field(default=None, ge=0)
    request_id: Name = Field(default_factory=lambda: new_id("request"))

    @field_validator("settings")
    @classmethod
    def _check_names(cls, settings: LiveSettings) -> LiveSettings:
        if not settings.model_fields_set:
            raise ValueError(f"name at least one of {', '.join(LIVE_NAMES)}")
        return settings


class SettingChange(StrictModel):
    """One setting, before and after; null: as the recipe says."""

    old: Schedule | int | None
    new: Schedule | int | None


class SettingEffect(StrictModel):
    """The first step of a lineage that was made with a changed setting.

    Learning rate, beta and the interval of evaluations: the first step that was acked with it. m: the step whose batch
    was the first to be drawn with it. Sampling temperature: the step that was next when the first visit was leased with
    it. A lineage that goes on with a change says so anew, from its own first step on.
    """

    name: LiveName
    lineage: int
    step: int
    at_s: float
    abandoned: bool
    """A resume went on from an earlier step: the living lineage does not have this one."""


class SettingsAudit(StrictModel):
    """One change: who, when, why, what; where the run stood; and where it took effect, if it has."""

    revision: int
    at_s: float
    role: Role
    reason: str | None
    lineage: int
    step: int
    """The last acked step at the time."""
    changes: dict[LiveName, SettingChange]
    effects: list[SettingEffect]


class SettingsInfo(StrictModel):
    """GET /v1/run/settings?after=REVISION: what holds now, and the changes after a revision, oldest first."""

    revision: int
    """Number of the last change; 0: there was none."""
    settings: LiveSettings
    """What was changed; null: as the recipe says."""
    recipe: LiveSettings
    """As the recipe says."""
    now: dict[LiveName, float]
    """The values for the next step."""
    changes: list[SettingsAudit]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""
