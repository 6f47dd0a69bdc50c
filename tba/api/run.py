"""Bodies about the run: live settings, number of searchers, components, waits, state and its changes."""

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
"""Reply header with the newest revision of the live settings, on draws, acks and changes of settings."""


class SettingsRequest(StrictModel):
    """PATCH /v1/run/settings: change the settings that `settings` names; null returns a setting to the recipe's value.

    A repeated request (same `request_id`) changes nothing, and gets the current settings. A trainer gives its fencing
    `token`. With `revision`, settings change only if that is the newest revision; otherwise the reply is 409. So a
    client that computes new values from the current ones never overwrites a change that it has not seen.
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
    """One live setting before and after a change; null: the recipe's value."""

    old: Schedule | int | float | None
    new: Schedule | int | float | None


class Audit(StrictModel):
    """Base of the records of changes: when and why a change was made, and the lineage and step of the run then."""

    at_s: float
    reason: str | None
    lineage: int
    step: int
    """The last acked step at that time."""


class SettingsAudit(Audit):
    """One change of live settings. The ledger has the revision with which each step was made."""

    revision: int
    role: Role
    changes: dict[LiveName, SettingChange]

    def line(self) -> str:
        """Return the change as one line of text for people."""
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
    """The settings that differ from the recipe; null: the recipe's value."""
    recipe: LiveSettings
    """The values of the recipe."""
    now: dict[LiveName, float]
    """The values for the next step, with schedules evaluated."""
    changes: list[SettingsAudit]
    next: int | None
    """Send it as `after` to get the changes that follow; null at the end."""


SearcherSource = Literal["operator", "recipe", "run-over"]


class SearchersInfo(StrictModel):
    """The desired and the actual number of searchers, as GET /v1/run shows them."""

    revision: int
    """Number of the last requested change; 0: there was none."""
    desired: int | None
    """The desired number of searchers; null: tba does not start or stop them (`scaling.backend = "none"`)."""
    source: SearcherSource | None
    """Origin of `desired`. `operator`: a request (`tba scale`). `recipe`: `scaling.num_searchers` with Kubernetes, else
    `searcher.num_searchers`. `run-over`: the end of the run, which scales down to 0."""
    alive: int
    """Number of searchers that send heartbeats and have not ended."""
    backend: Literal["none", "local", "kubernetes"]
    note: str | None = None
    """An obstacle to scaling, or a change that was made without a request."""


class ScaleRequest(StrictModel):
    """PATCH /v1/run/searchers: change the number of searchers; null returns to the number of the recipe or the chart.

    A repeated request (same `request_id`) changes nothing, and gets the current numbers.
    """

    num_searchers: Integer | None = Field(ge=0)
    reason: Reason | None = None
    request_id: Name = Field(default_factory=partial(new_id, "request"))


class ScaleAudit(Audit):
    """One change of the number of searchers; null: the number of the recipe or the chart."""

    revision: int
    role: Literal["operator"]
    old: int | None
    new: int | None


class ScalingInfo(StrictModel):
    """GET /v1/run/searchers?after=REVISION: number of searchers, and its changes after a revision, oldest first."""

    searchers: SearchersInfo
    changes: list[ScaleAudit]
    next: int | None
    """Send it as `after` to get the changes that follow; null at the end."""


ACKNOWLEDGED_HEADER = "tba-acknowledged"
"""Header of heartbeats and their replies, PROCESS:NUMBER. A buffer process counted NUMBER acknowledged changes."""
AuditRole = Role | Literal["buffer"]
"""The author of a change of the run: an operator, the trainer, or the buffer (when rewards can never be known)."""


class ComponentWait(StrictModel):
    """The named wait of a component: seconds since it began, and seconds until its deadline."""

    name: str
    for_s: float
    deadline_in_s: float


class WaitInfo(ComponentWait):
    """A wait, and the component that waits (`owner`)."""

    owner: str
    kind: str | None = None
    """Kind of the component that waits."""


ENDED = frozenset({"ended", "done", "stopped"})
"""Last states of components that ended cleanly. One that stops sending heartbeats in another state counts as silent."""


class ComponentInfo(StrictModel):
    """One component. Searchers, trainer and launcher are shown by their last heartbeat. The reward service is shown by
    its last answer to the buffer's GET /readyz. The buffer is a component too."""

    component_id: str
    kind: str
    state: str
    version: VersionText | None
    """Version of the weights that it holds."""
    alive: bool
    heartbeat_age_s: float
    """Seconds since its last heartbeat or answer."""
    gauges: dict[str, float]
    wait: ComponentWait | None = None
    """Its current wait, if it is alive."""
    note: str | None = None
    """Why it is in this state, if known."""


class RunChange(Audit):
    """One change of the state of the run. After a pause or stop no batch is drawn, but the current step is finished."""

    number: int
    command: Literal["pause", "resume", "stop", "done", "fail", "lineage", "accept-loss", "rollback"]
    """`lineage`: a trainer continued a run that was stopping or over, or carried out a `rollback`. `accept-loss` and
    `rollback` do not change the state."""
    role: AuditRole
    old: RunState
    new: RunState
    num_lost: int | None = None
    """With `accept-loss`: number of acknowledged changes that Redis has lost; 0: their number is unknown."""
    rollback: VersionText | None = None
    """The checkpoint of an operator's rollback, which was requested (`rollback`), carried out (`lineage`), or withdrawn
    because the run ended first (`stop`, `fail`)."""


class RunChanges(StrictModel):
    """GET /v1/run/changes?after=NUMBER: the changes of the run's state after a given one, oldest first."""

    changes: list[RunChange]
    next: int | None
    """Send it as `after` to get the changes that follow; null at the end."""


class RollbackRequest(StrictModel):
    """Have the trainer return to the newest checkpoint at or before `step`, of the active lineage or its ancestors.

    The trainer does so before its next step, in a new lineage. A repeated request (same `request_id`) changes nothing,
    unless more than 30 others came in between. A request for the checkpoint of a waiting rollback changes nothing.
    """

    step: Integer = Field(ge=0, le=MAX_STEP)
    reason: Reason | None = None
    request_id: Name = Field(default_factory=partial(new_id, "request"))


class RollbackInfo(StrictModel):
    """A requested rollback that the trainer has not begun."""

    version: VersionText
    """The checkpoint to return to; if it is missing or damaged, the trainer takes an older one."""
    step: int
    """The step that the operator asked for; that of `version` may be lower."""
    reason: str | None
    at_s: float
    request_id: Name


class RunInfo(StrictModel):
    """GET /v1/run: the state of the run, its weight versions, components, waits and evaluations."""

    run: str
    state: RunState
    state_reason: str | None
    note: str | None = None
    """A note for people, for example that no trainer is running. It does not change the state."""
    read_only: bool = False
    """Whether this is a view of the files of a finished run (`buffer.read_only`, whose text is in `note`). Then no
    component is alive, and every write is refused."""
    loss: str | None = None
    """Text about acknowledged changes that Redis has lost. Writes are refused until they are back, or until an operator
    accepts the loss. None: none are missing."""
    num_lost_changes: int = 0
    """Number of acknowledged changes that Redis has lost and an operator has accepted as lost."""
    last_change: RunChange | None = None
    """The change that brought the run into this state; None: the state has never changed."""
    step: int
    num_steps: int | None = None
    """`trainer.num_steps` of the recipe; None: not known."""
    max_policy_age_steps: int | None = None
    """`buffer.max_policy_age_steps`: older rollouts are evicted; None: no limit."""
    lineage: int
    parents: dict[int, VersionText]
    latest_version: VersionText | None
    """The newest published version."""
    sampling_version: VersionText | None = None
    """The version that searchers sample with: the newest one, or with `sampling.lag_steps` an older one."""
    checkpoint: VersionText | None
    checkpoint_key: str | None
    constants: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings that are constant within a run (`run.name`, `model.path`, ...), from the buffer's recipe."""
    num_rollbacks: int = 0
    """Number of rollbacks by alarms, which guards limit to three. Rollbacks by operators are not counted."""
    rollback: RollbackInfo | None = None
    """An operator's rollback that no trainer has begun yet."""
    components: list[ComponentInfo]
    waits: list[WaitInfo]
    evals: list[EvalInfo]
    best: BestVersion | None = None
    """The best version so far; None: no finished evaluation has a value of `eval.best_metric`."""
    origin: OriginInfo | None = None
    """The snapshot that the run began with; None: it began with an empty buffer."""
    searchers: SearchersInfo | None = None
    """Number of desired and of alive searchers; the services always send it."""
    summary: RunSummary | None = None
    """The state of the run in sentences; None: the request did not ask for it."""


class RunCommand(StrictModel):
    """Fields of all commands that change the run. `reason` is shown to people; a trainer sends its fencing `token`."""

    reason: Reason | None = None
    token: Name | None = None


CommandName = Literal["pause", "resume", "stop", "done", "fail", "accept-loss", "rollback"]


class CommandRequest(RunCommand):
    """POST /v1/run: change the state of the run. Each command is allowed to these roles:

    pause                 operator, trainer
    resume, stop          operator
    done, fail            trainer
    accept-loss           operator: continue without the acknowledged data that Redis has lost
    rollback              operator: return to the newest checkpoint at or before `step` (`RollbackRequest`)
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
