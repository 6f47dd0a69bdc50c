"""What changed between two looks at the run: the events of GET /v1/events (tba/api/events.py names them).

Ages, gauges and how long waits have lasted change all the time: of a component an event tells when its state, version,
note, or whether it is alive has changed, and of a wait when it has lasted LASTING_S and when it is over. The note of
the run tells an age too: an event tells when it comes and when it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from tba.api import ComponentInfo, RunInfo, SettingsAudit, WaitInfo
from tba.api.events import EventName, WaitChange

LASTING_S = 1.0
_OWN_EVENTS = ("components", "waits", "evals")
Change = tuple[EventName, bytes]
"""Name and JSON of one event."""


@dataclass(frozen=True, slots=True)
class Look:
    """The run at one moment, and the newest changes of its live settings."""

    run: RunInfo
    settings: Sequence[SettingsAudit]


def whole(look: Look) -> Change:
    """The run as a whole."""
    return "run", look.run.model_dump_json().encode()


def changes(before: Look, after: Look) -> Iterator[Change]:
    """The events that lead from one look to the next."""
    changed = {
        name: getattr(after.run, name)
        for name in RunInfo.model_fields
        if name not in _OWN_EVENTS and getattr(after.run, name) != getattr(before.run, name)
    }
    if (before.run.note is None) == (after.run.note is None):
        changed.pop("note", None)
    if changed:
        yield "change", to_json(changed)
    yield from _components(before.run, after.run)
    yield from _waits(_lasting(before.run), _lasting(after.run))
    known = {item.eval_id: item for item in before.run.evals}
    for item in after.run.evals:
        if known.get(item.eval_id) != item:
            yield "evaluation", item.model_dump_json().encode()
    audits = {audit.revision: audit for audit in before.settings}
    for audit in after.settings:
        if audits.get(audit.revision) != audit:
            yield "settings", audit.model_dump_json().encode()


def _components(before: RunInfo, after: RunInfo) -> Iterator[Change]:
    known = {item.component_id: _seen(item) for item in before.components}
    for item in after.components:
        if known.pop(item.component_id, None) != _seen(item):
            yield "component", item.model_dump_json().encode()
    for component_id in known:
        yield "gone", to_json({"component_id": component_id})


def _seen(item: ComponentInfo) -> tuple[Any, ...]:
    return item.kind, item.state, item.version, item.alive, item.note


def _lasting(run: RunInfo) -> dict[tuple[str, str], WaitInfo]:
    return {(wait.owner, wait.name): wait for wait in run.waits if wait.for_s >= LASTING_S}


def _waits(before: Mapping[tuple[str, str], WaitInfo], after: Mapping[tuple[str, str], WaitInfo]) -> Iterator[Change]:
    for key, wait in before.items():
        if key not in after:
            yield "wait", WaitChange(**wait.model_dump(), over=True).model_dump_json().encode()
    for key, wait in after.items():
        if key not in before:
            yield "wait", WaitChange(**wait.model_dump(), over=False).model_dump_json().encode()
