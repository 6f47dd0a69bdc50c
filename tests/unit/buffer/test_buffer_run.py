"""The state of a run: its events, its notes and its live settings."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import tba_buffer.run.event_streams
from prometheus_client import CollectorRegistry
from tba_buffer.run.components import ABSENT_AFTER_S, absent_trainer
from tba_buffer.run.event_streams import MAX_QUEUED, Events, ObservedRun, Stream, changes
from tba_buffer.run.settings import Settings, read_settings

from tba.api import ComponentInfo, RunInfo, RunState, WaitInfo
from tba.clients.sse import MAX_EVENT_BYTES, SentEvent, read_events, run_event
from tba.errors import BadReplyError, ConfigError, UnavailableError
from tests.support.history_values import RUN_INFO
from tests.support.trainer_values import make_recipe

# ---- The source of an event, and the duration of polling ------------------------------------------------------------


def look(**fields: Any) -> ObservedRun:
    return ObservedRun(RunInfo.model_validate({**RUN_INFO, **fields}), [])


def component(**fields: Any) -> ComponentInfo:
    values = {"component_id": "s-1", "kind": "searcher", "state": "running", "version": "1-2", "alive": True}
    return ComponentInfo.model_validate({**values, "heartbeat_age_s": 0.1, "gauges": {}, **fields})


def told(before: ObservedRun, after: ObservedRun) -> list[tuple[str, Any]]:
    return [(name, json.loads(data)) for name, data in changes(before, after)]


# ---- changes --------------------------------------------------------------------------------------------------------


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
    """Looks that are counted, of a run whose step advances."""

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
    monkeypatch.setattr(tba_buffer.run.event_streams, "EVERY_S", 0.001)
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
    for _ in range(2 * tba_buffer.run.event_streams.MAX_STREAMS):
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


# ---- A reader of a run without a trainer sees that ------------------------------------------------------------------


def trainer(component_id: str, age_s: float, kind: str = "trainer") -> ComponentInfo:
    return ComponentInfo(
        component_id=component_id,
        kind=kind,
        state="training",
        version=None,
        alive=age_s < 15,
        heartbeat_age_s=age_s,
        gauges={},
    )


def note(
    *components: ComponentInfo, state: RunState = "running", had_trainer: bool = True, watched_s: float = 1e4
) -> str | None:
    return absent_trainer(state, 41, components, had_trainer=had_trainer, watched_s=watched_s)


def test_the_newest_trainer_that_is_silent_is_named_with_age_and_step() -> None:
    assert note(trainer("t-1", 900.0), trainer("t-2", 312.4), trainer("s-1", 1.0, "searcher")) == (
        "no trainer: t-2 was last heard from 312 s ago, step 41; "
        "look at the trainer's log, on Kubernetes at its Job and pods"
    )
    assert note(trainer("t-1", 900.0), trainer("t-2", ABSENT_AFTER_S)) is None
    assert note(trainer("t-1", 900.0), watched_s=ABSENT_AFTER_S) is None, "it may be this buffer that was away"


def test_none_that_ever_came_and_one_that_is_forgotten_are_told_apart() -> None:
    assert (note() or "").startswith("no trainer: none was heard from for 1 h, step 41; ")
    assert (note(had_trainer=False, watched_s=70.0) or "").startswith(
        "no trainer: none has come since the buffer started 70 s ago; "
    )
    assert note(had_trainer=False, watched_s=ABSENT_AFTER_S) is None


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_run_that_is_over_needs_none(state: RunState) -> None:
    assert note(trainer("t-1", 900.0), state=state) is None


def test_followers_are_told_when_it_comes_and_goes_and_not_that_it_grows_old() -> None:
    looks = [
        ObservedRun(RunInfo.model_validate({**RUN_INFO, "note": text}), []) for text in (None, "60 s", "61 s", None)
    ]
    told = [[name for name, _ in changes(before, after)] for before, after in pairwise(looks)]
    assert told == [["change"], [], ["change"]]


# ---- The view that a buffer process has of the live settings in Redis -----------------------------------------------


class SlowFirst:
    """Redis whose first answer comes long after it was made."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        self.num_calls += 1
        revision = self.num_calls
        for _ in range(50 if revision == 1 else 0):
            await asyncio.sleep(0)
        return {b"revision": b"%d" % revision, b"value:beta": b"0.%d" % revision}


class Holds:
    """Redis with a hash."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self.fields = fields

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        return self.fields


KEYS: Any = SimpleNamespace(settings="settings")


def test_an_answer_that_comes_late_does_not_put_an_older_revision_back() -> None:
    context: Any = SimpleNamespace(redis=SlowFirst(), keys=KEYS, recipe=make_recipe("model"))
    lineages: Any = None

    async def both() -> Settings:
        settings = Settings(context, lineages)
        await asyncio.gather(settings.load(), settings.load())
        return settings

    settings = asyncio.run(both())
    assert settings.revision == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"-1", r"'beta\.value' has the value -1"),
        (b'{"value": 1, "shape": "line"}', r"unknown key 'beta\.shape'"),
        (b"{", "Expecting"),
    ],
)
def test_a_stored_value_that_this_release_cannot_read_is_one_sentence(value: bytes, message: str) -> None:
    redis: Any = Holds({b"revision": b"3", b"value:beta": value})
    with pytest.raises(ConfigError, match=rf"live settings \(revision 3\) .* cannot read: .*{message}") as caught:
        asyncio.run(read_settings(redis, KEYS, make_recipe("model")))
    assert "\n" not in str(caught.value)
