"""`tba status --follow`: what happens in a run, line by line, until it is over or Ctrl-C."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from tba.api import ComponentInfo, EvalInfo, RunEvent, RunInfo, SettingsAudit, WaitChange
from tba.cli.control import change_line, component_line, eval_line, state_line
from tba.clients import BufferClient
from tba.errors import BusyError, UnavailableError
from tba.local.eval_table import best_text
from tba.local.setting_changes import change_lines
from tba.plain_text import shown

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
AWAY_S = 120.0
"""A buffer that does not answer for so long is given up (wait "buffer-unreachable")."""
OVER = ("done", "failed")


def follow(client: BufferClient, *, as_json: bool) -> int:
    """Print every event; 0 when the run is done, 1 when it has failed.

    Raises:
        UnavailableError: the buffer has not answered for AWAY_S.
        ServiceError: it refuses.
    """
    teller = Teller()
    for event in lasting_events(client, say=lambda text: print(text, file=sys.stderr, flush=True)):
        lines = [event.model_dump_json()] if as_json else [f"{_now()} {shown(line)}" for line in teller.lines(event)]
        for line in lines:
            print(line, flush=True)
        if (state := event.data.get("state")) in OVER and event.event in ("run", "change"):
            return int(state == "failed")
    return 0


def lasting_events(client: BufferClient, *, say: Callable[[str], None], away_s: float = AWAY_S) -> Iterator[RunEvent]:
    """The events of one stream after the other: a cut costs nothing while the buffer knows the last id.

    Raises:
        UnavailableError: the buffer has not answered for `away_s`.
        ServiceError: it refuses.
    """
    last_id: str | None = None
    answered_s, pause_s, is_away = time.monotonic(), MIN_PAUSE_S, False
    while True:
        try:
            for event in client.events(last_event_id=last_id):
                if is_away:
                    say("the buffer answers again")
                answered_s, pause_s, is_away = time.monotonic(), MIN_PAUSE_S, False
                last_id = event.id
                yield event
            answered_s = time.monotonic()  # it ended the stream in good order
        except BusyError as error:
            say(f"{error}; trying again")
            answered_s = time.monotonic()
            pause_s = max(pause_s, error.retry_after_s)
        except UnavailableError as error:
            if time.monotonic() - answered_s > away_s:
                raise
            if not is_away:
                say(f"{error}; trying again for {away_s:.0f} s")
            is_away = True
        time.sleep(random.uniform(0.5, 1.0) * pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class Teller:
    """Tells events as people read them; knows the run so far."""

    def __init__(self) -> None:
        self._run: dict[str, Any] = {}
        self._told: dict[str, str] = {}

    def lines(self, event: RunEvent) -> list[str]:
        """One fact per line."""
        match event.event:
            case "run":
                self._run = event.data
                return self._whole()
            case "change":
                self._run = {**self._run, **event.data}
                return self._changed(event.data)
            case "component":
                return self._component(ComponentInfo.model_validate(event.data))
            case "gone":
                return [f"{event.data['component_id']}: gone, silent for an hour"]
            case "wait":
                return [_wait_line(WaitChange.model_validate(event.data))]
            case "settings":
                return change_lines([SettingsAudit.model_validate(event.data)])
            case "evaluation":
                return [eval_line(EvalInfo.model_validate(event.data))]
            case "trouble":
                detail = event.data.get("detail")
                return [f"the buffer cannot read the run: {detail}" if detail else "the buffer can read the run again"]

    def _whole(self) -> list[str]:
        info = RunInfo.model_validate(self._run)
        waits = [WaitChange(**wait.model_dump(), over=False) for wait in info.waits]
        note = [] if info.note is None else [info.note]
        return [state_line(info), *note, *(component_line(item) for item in info.components), *map(_wait_line, waits)]

    def _component(self, item: ComponentInfo) -> list[str]:
        """Nothing when a trainer has only made a step: that is told as the run's."""
        told = item.model_copy(update={"version": None}) if item.kind == "trainer" else item
        line, known = component_line(told), self._told.get(item.component_id)
        self._told[item.component_id] = line
        return [] if line == known else [component_line(item)]

    def _changed(self, changed: dict[str, Any]) -> list[str]:
        info = RunInfo.model_validate(self._run)
        lines = []
        if changed.keys() & {"state", "state_reason", "lineage"}:
            lines.append(state_line(info))
            if "last_change" in changed and info.last_change is not None:
                lines.append(change_line(info.last_change))
        elif "step" in changed or "latest_version" in changed:
            lines.append(f"step {info.step}, latest version {info.latest_version or 'none'}")
        if "note" in changed and (info.note or info.state not in OVER):  # a run that is over needs none
            lines.append(info.note or "a trainer is heard of again")
        if "searchers" in changed and info.searchers is not None:
            wanted = "" if info.searchers.wanted is None else f" of {info.searchers.wanted} wanted"
            note = f": {info.searchers.note}" if info.searchers.note else ""
            lines.append(f"searchers: {info.searchers.alive}{wanted} alive{note}")
        if "checkpoint" in changed:
            lines.append(f"checkpoint {info.checkpoint or 'none'}")
        if "best" in changed and info.best is not None:
            lines.append(best_text(info.best))
        return lines


def _wait_line(wait: WaitChange) -> str:
    if wait.over:
        return f"{wait.owner} no longer waits for {wait.name!r}: {wait.for_s:.0f} s"
    left_s = max(0.0, wait.deadline_in_s)
    return f"{wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, at most {left_s:.0f} s more"


def _now() -> str:
    return datetime.now().strftime("%H:%M:%S")
