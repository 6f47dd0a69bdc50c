"""GET /v1/events: what happens in a run, as server-sent events."""

from __future__ import annotations

from typing import Any, Literal, get_args

from tba.api.run import WaitInfo
from tba.config.base import StrictModel

EventName = Literal["run", "change", "component", "gone", "wait", "settings", "evaluation", "trouble"]
EVENT_NAMES: tuple[EventName, ...] = get_args(EventName)


class RunEvent(StrictModel):
    """One event as a client gets it. What `data` holds depends on `event`:

    run         RunInfo: the run as a whole; the first event, unless a stream goes on where another one was cut
    change      fields of RunInfo that have changed, with their values now (not components, waits and evals)
    component   ComponentInfo: one is new, or its state, version, note, or whether it is alive has changed
    gone        {"component_id"}: one was silent for so long that it is forgotten
    wait        WaitChange: a wait has lasted a second; or such a one is over
    settings    SettingsAudit: live settings were changed, or a change has taken effect
    evaluation  EvalInfo: one was begun, or it goes on
    trouble     {"detail"}: the buffer cannot read the run now, and why; null: it can again
    """

    id: str | None
    """Send the last one as the header Last-Event-ID, and the next stream goes on there."""
    event: EventName
    data: dict[str, Any]


class WaitChange(WaitInfo):
    """A wait that has lasted for a while, or the end of it."""

    over: bool
