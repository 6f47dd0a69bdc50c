"""What an event is made from, and how long anybody looks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import tba_buffer.run.events
from prometheus_client import CollectorRegistry
from tba_buffer.run.events import MAX_QUEUED, Events, ObservedRun, Stream, changes

from tba.api import ComponentInfo, RunInfo, WaitInfo
from tba.clients.sse import MAX_EVENT_BYTES, SentEvent, read_events, run_event
from tba.errors import BadReplyError, UnavailableError
from tests.support.history_values import RUN_INFO


def look(**fields: Any) -> ObservedRun:
    return ObservedRun(RunInfo.model_validate({**RUN_INFO, **fields}), [])


def component(**fields: Any) -> ComponentInfo:
    values = {"component_id": "s-1", "kind": "searcher", "state": "running", "version": "1-2", "alive": True}
    return ComponentInfo.model_validate({**values, "heartbeat_age_s": 0.1, "gauges": {}, **fields})


def told(before: ObservedRun, after: ObservedRun) -> list[tuple[str, Any]]:
    return [(name, json.loads(data)) for name, data in changes(before, after)]


# ---- what changed ---------------------------------------------------------------------------------------------------


def test_a_look_that_finds_the_same_tells_nothing() -> None:
    wait = {"owner": "s-1", "name": "no-version"}
    before = look(
        components=[component(heartbeat_age_s=0.1, gauges={"a": 1.0})],
        waits=[WaitInfo(**wait, for_s=2.0, deadline_in_s=8.0)],
    )
    after = look(
        components=[component(heartbeat_age_s=0.9, gauges={"a": 2.0})],
        waits=[WaitInfo(**wait, for_s=2.5, deadline_in_s=7.5)],
    )
    assert told(before, after) == []


def test_fields_of_the_run_are_told_with_their_values() -> None:
    assert told(look(), look(step=4, latest_version="1-4")) == [("change", {"step": 4, "latest_version": "1-4"})]


@pytest.mark.parametrize("change", [{"state": "draining"}, {"version": None}, {"alive": False}, {"note": "why"}])
def test_what_matters_of_a_component_is_told(change: dict[str, Any]) -> None:
    ((name, data),) = told(look(components=[component()]), look(components=[component(**change)]))
    assert name == "component"
    assert {key: data[key] for key in change} == change


def test_new_and_forgotten_components_are_told() -> None:
    before, after = look(components=[component()]), look(components=[component(component_id="s-2")])
    assert [(name, data["component_id"]) for name, data in told(before, after)] == [
        ("component", "s-2"),
        ("gone", "s-1"),
    ]


def test_waits_are_told_once_they_have_lasted_and_when_they_are_over() -> None:
    def waiting(for_s: float) -> ObservedRun:
        return look(waits=[WaitInfo(owner="t", kind="trainer", name="batch", for_s=for_s, deadline_in_s=9.0)])

    assert told(look(), waiting(0.4)) == []
    ((name, data),) = told(waiting(0.4), waiting(1.2))
    assert (name, data["owner"], data["kind"], data["name"], data["over"]) == ("wait", "t", "trainer", "batch", False)
    ((name, data),) = told(waiting(1.2), look())
    assert (name, data["over"]) == ("wait", True)
    assert told(waiting(0.4), look()) == []


# ---- streams --------------------------------------------------------------------------------------------------------


class Reader:
    """Looks that are counted, of a run whose step goes on."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.error: UnavailableError | None = None

    async def look(self) -> ObservedRun:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        return look(step=self.num_looks)


async def until_looked(reader: Reader, num: int) -> None:
    async with asyncio.timeout(60):
        while reader.num_looks < num:
            await asyncio.sleep(0.001)


async def test_nobody_looks_while_nobody_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tba_buffer.run.events, "EVERY_S", 0.001)
    reader = Reader()
    events = Events(reader.look, CollectorRegistry())
    first, second = await events.open(None), await events.open(None)
    await until_looked(reader, 10)
    events.close(first, "client")
    await until_looked(reader, reader.num_looks + 5)
    events.close(second, "client")
    events.close(second, "client")  # twice counts once
    watch = events._task
    assert watch is not None
    await asyncio.wait_for(watch, 60)
    num = reader.num_looks
    await asyncio.sleep(0.02)
    assert reader.num_looks == num
    third = await events.open(None)
    await until_looked(reader, num + 5)
    events.close(third, "client")
    await events.stop()
    with pytest.raises(UnavailableError, match="stops"):
        await events.open(None)


async def test_a_stream_that_cannot_begin_takes_no_place() -> None:
    reader = Reader()
    events = Events(reader.look, CollectorRegistry())
    reader.error = UnavailableError("Redis is away")
    for _ in range(2 * tba_buffer.run.events.MAX_STREAMS):
        with pytest.raises(UnavailableError, match="Redis is away"):
            await events.open(None)
    reader.error = None
    assert not (await events.open(None)).queue.empty()
    await events.stop()


async def test_one_look_may_find_more_than_a_queue_holds() -> None:
    stream = Stream()
    stream.is_open = True
    stream.put([b"x"] * (3 * MAX_QUEUED))  # all searchers got new weights
    assert (stream.is_slow, stream.queue.qsize()) == (False, 3 * MAX_QUEUED)
    stream.put([b"y"])
    assert (stream.is_slow, stream.queue.qsize()) == (True, 3 * MAX_QUEUED)


# ---- reading them ---------------------------------------------------------------------------------------------------

SENT = (
    b'retry: 1000\n\n: ping\n\nevent: run\ndata: {"a":\ndata: 1}\nid: x-0\n\n'
    b": ping\r\n\r\ndata: \xc3\xa4\r\n\r\ndata: cut"
)


def test_events_are_read_wherever_the_bytes_are_cut() -> None:
    expected = [SentEvent("run", '{"a":\n1}', "x-0"), SentEvent("message", "ä", "x-0")]
    assert list(read_events([SENT])) == expected
    assert list(read_events([SENT[i : i + 1] for i in range(len(SENT))])) == expected
    for at in range(len(SENT)):
        assert list(read_events([SENT[:at], SENT[at:]])) == expected


@pytest.mark.parametrize("sent", [b"data: \xff\n\n", b"data: " + b"x" * MAX_EVENT_BYTES])
def test_what_is_no_stream_is_refused(sent: bytes) -> None:
    with pytest.raises(BadReplyError):
        list(read_events([sent]))


@pytest.mark.parametrize("sent", [SentEvent("message", "{}", None), SentEvent("run", "no json", "1-1")])
def test_events_of_another_release_are_refused_with_a_sentence(sent: SentEvent) -> None:
    with pytest.raises(BadReplyError, match="run the same tba release"):
        run_event(sent)
