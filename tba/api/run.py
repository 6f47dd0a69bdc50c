"""The run, its components and its waits."""

from __future__ import annotations

from typing import Literal

from tba.api.base import Name, Reason, RunState, VersionText
from tba.api.evals import BestVersion, EvalInfo
from tba.api.scaling import SearchersInfo
from tba.api.settings import Role
from tba.api.snapshots import OriginInfo
from tba.config.base import StrictModel


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
    command: Literal["pause", "resume", "stop", "done", "fail", "lineage"]
    """`lineage`: a trainer went on with a run that was stopping or over."""
    role: Role
    reason: str | None
    old: RunState
    new: RunState
    lineage: int
    step: int
    """The last acked step at the time; no batch is drawn after a pause or stop, and the step under way is finished."""


class RunChanges(StrictModel):
    """GET /v1/run/changes?after=NUMBER: the changes of the state after one of them, oldest first."""

    changes: list[RunChange]
    next: int | None
    """Send it as `after` for the changes that follow; null at the end."""


class RunInfo(StrictModel):
    """GET /v1/run."""

    run: str
    state: RunState
    state_reason: str | None
    note: str | None = None
    """What else people should know: that no trainer is there. It does not change the state."""
    last_change: RunChange | None = None
    """Who brought the run into this state, and when; None: it is as it began."""
    step: int
    lineage: int
    parents: dict[int, VersionText]
    latest_version: VersionText | None
    checkpoint: VersionText | None
    checkpoint_key: str | None
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


class RunCommand(StrictModel):
    """POST /v1/run/{pause,resume,stop,done,fail}; reason is shown to people. `token`: a trainer sends its own."""

    reason: Reason | None = None
    token: Name | None = None
