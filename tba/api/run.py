"""The run: live settings, number of searchers, components and waits, state and its changes, events."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from tba.api.evaluations import BestVersion, EvalInfo
from tba.api.snapshots import OriginInfo
from tba.api.stats import RunSummary
from tba.config.live_settings import LIVE_NAMES, LiveName, LiveSettings, setting_text
from tba.config.schedules import Schedule
from tba.fields import MAX_STEP, Integer, Name, Reason, RunState, StrictModel, VersionText
from tba.wire.codec import new_id

Role = Literal["operator", "trainer"]
MAX_CHANGES_PER_PAGE = 1000
SETTINGS_HEADER = "tba-settings-revision"
"""Header of the replies to draws, acks and changes: the newest revision."""


class SettingsRequest(StrictModel):
    """PATCH /v1/run/settings: change the settings that `settings` names; null there means "as the recipe says" again.

    The same request again (same `request_id`) changes nothing and is answered as the run is now. A trainer gives its
    fencing `token`. With `revision` they change only while that is the newest one (409 otherwise), so that a client
    which computes new values from the current ones overwrites no change in between.
    """

    settings: LiveSettings
    reason: Reason | None = None
    token: Name | None = None
    revision: Integer | None = Field(default=None, ge=0)
    request_id: Name = Field(default_factory=partial(new_id, "request"))

    @field_validator("settings")
    @classmethod
    def _check_names(cls, settings: LiveSettings) -> LiveSettings:
        # an empty change would make a revision and a line of the audit for nothing
        if not settings.model_fields_set:
            raise ValueError(f"name at least one of {', '.join(LIVE_NAMES)}")
        return settings


class SettingChange(StrictModel):
    """One setting, before and after; null: as the recipe says."""

    old: Schedule | int | float | None
    new: Schedule | int | float | None


class Audit(StrictModel):
    """A change that somebody made: when, why, and where the run stood."""

    at_s: float
    reason: str | None
    lineage: int
    step: int
    """The last acked step at the time."""


class SettingsAudit(Audit):
    """One change of live settings. The ledger says with which revision each step was made."""

    revision: int
    role: Role
    changes: dict[LiveName, SettingChange]

    def line(self) -> str:
        """Return the change as text for people."""
        what = ", ".join(
            f"{name} {setting_text(change.old)} -> {setting_text(change.new)}" for name, change in self.changes.items()
        )
        reason = f" ({self.reason})" if self.reason else ""
        return f"revision {self.revision}, by the {self.role} after step {self.step}: {what}{reason}"


class SettingsInfo(StrictModel):
    """GET /v1/run/settings?after=REVISION: the current settings, and the changes after a revision, oldest first."""

    revision: int
    """Number of the last change; 0: there was none."""
    settings: LiveSettings
    """The changed settings; null: as the recipe says."""
    recipe: LiveSettings
    """As the recipe says."""
    now: dict[LiveName, float]
    """The values for the next step."""
    changes: list[SettingsAudit]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""


SearcherSource = Literal["operator", "recipe", "run-over"]


class SearchersInfo(StrictModel):
    """The searchers as GET /v1/run shows them."""

    revision: int
    """Number of the last change that was asked for; 0: there was none."""
    desired: int | None
    """The desired number; null: tba does not start or stop searchers (`scaling.backend = "none"`), or the Kubernetes
    API has not answered yet."""
    source: SearcherSource | None
    """Where that number is from: an operator (`tba scale`), the recipe (`tba run`), the Deployment itself (its chart,
    or an edit), or the end of the run, which scales down to 0."""
    alive: int
    """Searchers that send heartbeats and have not ended."""
    backend: Literal["none", "local", "kubernetes"]
    note: str | None = None
    """An obstacle, or a change that was made without a request."""


class ScaleRequest(StrictModel):
    """PATCH /v1/run/searchers; null: the number of the recipe or the chart again.

    The same request again (same `request_id`) changes nothing and is answered as the run is now.
    """

    num_searchers: Integer | None = Field(ge=0)
    reason: Reason | None = None
    request_id: Name = Field(default_factory=partial(new_id, "request"))


class ScaleAudit(Audit):
    """One change of the number of searchers; null: as the recipe or the chart says."""

    revision: int
    role: Literal["operator"]
    old: int | None
    new: int | None


class ScalingInfo(StrictModel):
    """GET /v1/run/searchers?after=REVISION: the searchers, and the changes after a revision, oldest first."""

    searchers: SearchersInfo
    changes: list[ScaleAudit]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""


ACKNOWLEDGED_HEADER = "tba-acknowledged"
"""Header of heartbeats and their replies: how much was acknowledged, and by which start of the buffer."""
AuditRole = Role | Literal["buffer"]
"""The author of a change of the run: a person, the trainer, or the buffer, if rewards can never be known."""


class ComponentWait(StrictModel):
    """The wait of a component: its name, how long it has lasted, and how long it may last."""

    name: str
    for_s: float
    deadline_in_s: float


class WaitInfo(ComponentWait):
    """A wait with its owner."""

    owner: str
    kind: str | None = None
    """Kind of the owner."""


ENDED = frozenset({"ended", "done", "stopped"})
"""Last states of components that ended cleanly. One that disappears in another state counts as silent."""


class ComponentInfo(StrictModel):
    """One component: a searcher, trainer or launcher as its last heartbeat showed it, the buffer itself, or the reward
    service as the buffer's request to its /readyz found it."""

    component_id: str
    kind: str
    state: str
    version: VersionText | None
    """Version of its weights."""
    alive: bool
    heartbeat_age_s: float
    """Time since its last sign of life."""
    gauges: dict[str, float]
    wait: ComponentWait | None = None
    """Its current wait, if it is alive."""
    note: str | None = None
    """Why it is in this state, if known."""


class RunChange(Audit):
    """One change of the state of the run. No batch is drawn after a pause or stop; the step under way is finished."""

    number: int
    command: Literal["pause", "resume", "stop", "done", "fail", "lineage", "accept-loss", "rollback"]
    """`lineage`: a trainer continued a run that was stopping or over, or did what `rollback` asked for. `accept-loss`
    and `rollback` leave the state as it is."""
    role: AuditRole
    old: RunState
    new: RunState
    num_lost: int | None = None
    """accept-loss: acknowledged changes that Redis did not have; 0: their number is unknown."""
    rollback: VersionText | None = None
    """The checkpoint that an operator's rollback was to return to: it was asked for (`rollback`), done (`lineage`), or
    withdrawn because the run ended before (`stop`, `fail`)."""


class RunChanges(StrictModel):
    """GET /v1/run/changes?after=NUMBER: the changes of the state after one of them, oldest first."""

    changes: list[RunChange]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""


class RollbackRequest(StrictModel):
    """Return to the newest checkpoint of the active lineage, or of those that it descends from, that is at or before
    `step`. The trainer does so at its next step boundary, in a new lineage.

    The same request again (same `request_id`) changes nothing, also after up to 30 others, and neither does another one
    for the checkpoint that a waiting one returns to.
    """

    step: Integer = Field(ge=0, le=MAX_STEP)
    reason: Reason | None = None
    request_id: Name = Field(default_factory=partial(new_id, "request"))


class RollbackInfo(StrictModel):
    """A rollback that waits for the trainer."""

    version: VersionText
    """The checkpoint that it returns to; where that turns out to be gone or damaged, an older one."""
    step: int
    """As it was asked for."""
    reason: str | None
    at_s: float
    request_id: Name


class RunInfo(StrictModel):
    """GET /v1/run: the state of the run, its weight versions, components, waits and evaluations."""

    run: str
    state: RunState
    state_reason: str | None
    note: str | None = None
    """A note for people, such as that no trainer is there. It does not change the state."""
    read_only: bool = False
    """This is a view of the files of a run that is over (`buffer.read_only`, whose text is the note): nothing of it is
    alive, and every write is refused."""
    loss: str | None = None
    """The acknowledged changes that Redis has lost; writes are refused until they are back, or an operator accepts the
    loss."""
    num_lost_changes: int = 0
    """Acknowledged changes that Redis lost and an operator accepted as lost."""
    last_change: RunChange | None = None
    """The change that brought the run into this state; None: it is as it began."""
    step: int
    num_steps: int | None = None
    """Optimizer steps that the recipe asks for; None: not known."""
    max_policy_age_steps: int | None = None
    """`buffer.max_policy_age_steps`: older rollouts are evicted; None: there is no bound."""
    lineage: int
    parents: dict[int, VersionText]
    latest_version: VersionText | None
    """The newest published version."""
    sampling_version: VersionText | None = None
    """The version that searchers sample with: the newest one, or an older one (`sampling.lag_steps`)."""
    checkpoint: VersionText | None
    checkpoint_key: str | None
    constants: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings that are constant within a run (`run.name`, `model.path`, ...), as the buffer's recipe has them."""
    num_rollbacks: int = 0
    """Lineages that began with the rollback of an alarm; an operator's are not counted: the
    bound of three is for what guards do by themselves."""
    rollback: RollbackInfo | None = None
    """The rollback that an operator has asked for and no trainer has begun."""
    components: list[ComponentInfo]
    waits: list[WaitInfo]
    evals: list[EvalInfo]
    best: BestVersion | None = None
    """None: no finished evaluation knows `eval.best_metric`."""
    origin: OriginInfo | None = None
    """The snapshot that the run began with; None: with nothing stored."""
    searchers: SearchersInfo | None = None
    """The desired and the alive searchers; the services always send it."""
    summary: RunSummary | None = None
    """None: it was not asked for."""


class RunCommand(StrictModel):
    """Why the run is changed; `reason` is shown to people. A trainer sends its fencing `token`."""

    reason: Reason | None = None
    token: Name | None = None


CommandName = Literal["pause", "resume", "stop", "done", "fail", "accept-loss", "rollback"]


class CommandRequest(RunCommand):
    """POST /v1/run: change the run.

    pause, resume, stop   an operator; pause also the trainer
    done, fail            the trainer
    accept-loss           an operator: continue without the acknowledged data that Redis has lost
    rollback              an operator: the trainer returns to the newest checkpoint at or before `step`. `request_id`
                          is that of `RollbackRequest`
    """

    command: CommandName
    step: Integer | None = Field(default=None, ge=0, le=MAX_STEP)
    request_id: Name | None = None

    @model_validator(mode="after")
    def _check_step(self) -> CommandRequest:
        if (self.step is not None) != (self.command == "rollback"):
            raise ValueError("`step` belongs to the command rollback, and it needs one")
        if self.request_id is not None and self.command != "rollback":
            raise ValueError("`request_id` belongs to the command rollback; leave it out")
        if self.token is not None and self.command in ("accept-loss", "rollback"):
            raise ValueError(f"`token` is that of a trainer; {self.command} takes none")
        return self
