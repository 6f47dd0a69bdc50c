"""The run, its components and its waits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from tba.api.base import Name, Reason, RunState, VersionText
from tba.api.evals import BestVersion, EvalInfo
from tba.api.scaling import SearchersInfo
from tba.api.settings import Role
from tba.api.snapshots import OriginInfo
from tba.config.base import StrictModel

ACKNOWLEDGED_HEADER = "tba-acknowledged"
"""Of heartbeats and their replies: how much was acknowledged, and by which start of the buffer."""
AuditRole = Role | Literal["recipe", "buffer"]
"""Who changed the run: a person, the trainer, a setting that decides without asking (`recipe`), or the buffer itself,
where rewards can never be known."""


class WaitInfo(StrictModel):
    """Who waits for what since when, until when at most."""

    owner: str
    name: str
    for_s: float
    deadline_in_s: float
    kind: str | None = None
    """Of the owner."""


class ComponentWait(StrictModel):
    """What a component waits for: since when, until when at most."""

    name: str
    for_s: float
    deadline_in_s: float


class ComponentInfo(StrictModel):
    """One component: searcher, trainer or launcher as its last heartbeat showed it, the buffer itself, and the reward
    service as the buffer's probe of its /readyz found it."""

    component_id: str
    kind: str
    state: str
    version: VersionText | None
    """Of the weights that it holds."""
    alive: bool
    heartbeat_age_s: float
    """Since its last sign of life."""
    gauges: dict[str, float]
    wait: ComponentWait | None = None
    """What it waits for now, as far as it is alive."""
    note: str | None = None
    """Why it is in this state, where that is known."""


class RunChange(StrictModel):
    """One change of the state of the run: who, when, why, from what to what, and where the run stood."""

    number: int
    at_s: float
    command: Literal["pause", "resume", "stop", "done", "fail", "lineage", "accept-loss", "retry-versions"]
    """`lineage`: a trainer went on with a run that was stopping or over. `accept-loss` and `retry-versions` leave
    the state as it is."""
    role: AuditRole
    reason: str | None
    old: RunState
    new: RunState
    lineage: int
    step: int
    """The last acked step at the time; no batch is drawn after a pause or stop, and the step under way is finished."""
    num_lost: int | None = None
    """accept-loss: changes that had been acknowledged and that Redis did not have; 0: their number is not known."""


class RunChanges(StrictModel):
    """GET /v1/run/changes?after=NUMBER: the changes of the state after one of them, oldest first."""

    changes: list[RunChange]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""


class UnreadableItem(StrictModel):
    """Something stored that cannot be read: it is left out or shown as failed, and nothing else is."""

    kind: str
    name: str
    detail: str
    found_at_s: float


class UnreadableInfo(StrictModel):
    """What is stored and cannot be read, as far as it was found since the run began (at most 1,000 items)."""

    num: dict[str, int]
    """Kind -> items."""
    items: list[UnreadableItem]
    """The 20 that were found last."""


class RunInfo(StrictModel):
    """GET /v1/run."""

    run: str
    state: RunState
    state_reason: str | None
    note: str | None = None
    """What else people should know: that no trainer is there. It does not change the state."""
    loss: str | None = None
    """What Redis has lost of what was acknowledged; writes are refused until it is there again, or an operator accepts
    the loss."""
    num_lost_changes: int = 0
    """Acknowledged changes that Redis lost and that were accepted as lost."""
    last_change: RunChange | None = None
    """Who brought the run into this state, and when; None: it is as it began."""
    step: int
    lineage: int
    parents: dict[int, VersionText]
    latest_version: VersionText | None
    checkpoint: VersionText | None
    checkpoint_key: str | None
    constants: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings that are constant within a run (`run.name`, `model.path`, ...), as the buffer's recipe has them."""
    num_rollbacks: int = 0
    """Lineages that began with a rollback."""
    components: list[ComponentInfo]
    waits: list[WaitInfo]
    evals: list[EvalInfo]
    best: BestVersion | None = None
    """None: no finished evaluation knows `eval.best_metric`."""
    origin: OriginInfo | None = None
    """The snapshot that the run began with; None: with nothing stored."""
    searchers: SearchersInfo | None = None
    """How many searchers are wanted and alive; the services always tell."""
    unreadable: UnreadableInfo | None = None
    """None: all that is stored could be read, as far as it was."""


class RunCommand(StrictModel):
    """POST /v1/run/{pause,resume,stop,done,fail}; reason is shown to people. `token`: a trainer sends its own."""

    reason: Reason | None = None
    token: Name | None = None


class AcceptLoss(StrictModel):
    """POST /v1/run/accept-loss; the reason is kept in the audit."""

    reason: Reason | None = None
