"""What `tba status --follow` says of events, and how it bears a buffer that comes and goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from tba.api import RunEvent
from tba.clients import BufferClient
from tba.errors import BusyError, UnauthorizedError, UnavailableError
from tba_cli.commands import status
from tba_cli.commands.status import EventFormatter, lasting_events
from tests.support.history_values import RUN_INFO

TRAINER = {"component_id": "t", "kind": "trainer", "state": "training", "version": "1-2", "alive": True}
TRAINER |= {"heartbeat_age_s": 0.1, "gauges": {}}


def event(name: str, data: dict[str, Any], event_id: str = "x-1") -> RunEvent:
    return RunEvent.model_validate({"id": event_id, "event": name, "data": data})


class Service:
    """Streams as they are written here, one after the other."""

    def __init__(self, *streams: Sequence[RunEvent | Exception]) -> None:
        self.streams = list(streams)
        self.asked: list[str | None] = []

    def events(self, *, last_event_id: str | None = None) -> Iterator[RunEvent]:
        self.asked.append(last_event_id)
        for item in self.streams.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(status, "MAX_PAUSE_S", 0.0)


def test_a_run_that_ends_without_a_trainer_has_not_got_one_again() -> None:
    note = "no trainer: none has come since the buffer started 70 s ago"
    formatter = EventFormatter()
    formatter.lines(event("run", {**RUN_INFO, "note": note}))
    assert formatter.lines(event("change", {"note": None})) == ["a trainer is heard of again"]
    assert formatter.lines(event("change", {"note": note})) == [note]
    (line,) = formatter.lines(event("change", {"state": "done", "note": None}))
    assert line.startswith("run 'demo': done")


def test_events_are_told_in_a_line_each() -> None:
    formatter = EventFormatter()
    assert formatter.lines(event("run", RUN_INFO)) == ["run 'demo': running, step 3, lineage 1"]
    assert formatter.lines(event("change", {"step": 4, "latest_version": "1-4"})) == ["step 4, latest version 1-4"]
    paused = {"state": "paused", "state_reason": "lunch"}
    assert formatter.lines(event("change", paused)) == ["run 'demo': paused (lunch), step 4, lineage 1"]
    searchers = {
        "revision": 1,
        "desired": 3,
        "source": "operator",
        "alive": 1,
        "backend": "local",
        "note": "two are starting",
    }
    assert formatter.lines(event("change", {"searchers": searchers})) == [
        "searchers: 1 of 3 desired alive: two are starting"
    ]
    wait = {"owner": "s-1", "kind": "searcher", "name": "no-version", "for_s": 2.0, "deadline_in_s": 8.0}
    (line,) = formatter.lines(event("wait", {**wait, "over": False}))
    assert line == "s-1 waits for 'no-version': 2 s so far, at most 8 s more"
    (line,) = formatter.lines(event("wait", {**wait, "over": True}))
    assert line == "s-1 no longer waits for 'no-version': 2 s"
    assert formatter.lines(event("gone", {"component_id": "s-1"})) == ["s-1: gone, silent for an hour"]
    assert formatter.lines(event("problem", {"detail": "Redis is away"})) == [
        "the buffer cannot read the run: Redis is away"
    ]
    assert formatter.lines(event("problem", {"detail": None})) == ["the buffer can read the run again"]


def test_a_trainer_that_only_goes_on_is_told_once() -> None:
    formatter = EventFormatter()
    assert formatter.lines(event("component", TRAINER)) == ["t: training, version 1-2"]
    assert formatter.lines(event("component", {**TRAINER, "version": "1-3"})) == []
    assert formatter.lines(event("component", {**TRAINER, "version": "1-3", "state": "finishing"})) == [
        "t: finishing, version 1-3"
    ]


def test_it_goes_on_after_cuts_with_the_last_id_and_says_so_once() -> None:
    away = UnavailableError("the buffer does not answer")
    service = Service(
        [event("run", RUN_INFO, "x-1"), event("change", {"step": 4}, "x-2"), away],
        [away],
        [away],
        [event("change", {"step": 5}, "x-3")],
        [BusyError("32 streams are open", retry_after_s=0.0, wait="event-streams")],
        [event("change", {"step": 6}, "x-4"), UnauthorizedError("the token is not known any more")],
    )
    said: list[str] = []
    events = lasting_events(cast(BufferClient, service), on_progress=said.append, away_s=60.0)
    assert [next(events).id for _ in range(4)] == ["x-1", "x-2", "x-3", "x-4"]
    with pytest.raises(UnauthorizedError):
        next(events)
    assert service.asked == [None, "x-2", "x-2", "x-2", "x-3", "x-3"]
    assert said == [
        "the buffer does not answer; trying again for 60 s",
        "the buffer answers again",
        "32 streams are open; trying again",
    ]


def test_a_buffer_that_stays_away_is_given_up() -> None:
    service = Service(*([UnavailableError("the buffer does not answer")] for _ in range(3)))
    with pytest.raises(UnavailableError):
        list(lasting_events(cast(BufferClient, service), on_progress=lambda text: None, away_s=-1.0))
