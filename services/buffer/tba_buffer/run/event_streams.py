"""The streams of GET /v1/events (tba/api/run.py names the events).

Events               reads the run every EVERY_S while somebody follows, finds what changed, and feeds all streams
changes              the events that lead from one reading of the run to the next. Ages, gauges and the length of waits
                     change all the time, so they make no event
EventStreamResponse  one answer: sends a stream until its reader hangs up or is too slow, or until it must end

Each stream has a queue; the events themselves are shared. A reader that is more than MAX_QUEUED events behind is cut
off. It returns with Last-Event-ID and gets what it missed, while that is known, else the run as a whole. So no stream
holds more than MAX_QUEUED events and those of one reading.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from tba.api import ComponentInfo, RunInfo, SettingsAudit, WaitInfo
from tba.api.run import EventName, WaitChange
from tba.concurrency import SingleFlight
from tba.errors import BusyError, UnauthorizedError, UnavailableError
from tba.logs import get_logger

LASTING_S = 1.0
_OWN_EVENTS = ("components", "waits", "evals")
Change = tuple[EventName, bytes]
"""Name and JSON of one event."""


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The run at one moment, and the newest changes of its live settings."""

    run: RunInfo
    settings: Sequence[SettingsAudit]


def whole_run(observed: ObservedRun) -> Change:
    """Return the event that shows the run as a whole."""
    return "run", observed.run.model_dump_json().encode()


def changes(before: ObservedRun, after: ObservedRun) -> Iterator[Change]:
    """Yield the events that lead from one reading to the next."""
    changed = {
        name: getattr(after.run, name)
        for name in RunInfo.model_fields
        if name not in _OWN_EVENTS and getattr(after.run, name) != getattr(before.run, name)
    }
    # the note tells an age, which changes all the time: only its coming and going is an event
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


EVERY_S = 0.5
MAX_STREAMS = 32
MAX_QUEUED = 512
MAX_KEPT = 2048
FULL_RETRY_S = 5.0
STOP_TIMEOUT_S = 5.0
ENDINGS = ("client", "slow", "renewed", "unauthorized", "stopping")
"""Why a stream ended: the client hung up, or was too slow; it was old; its token was taken away; the service stops."""
log = get_logger("events")


class Stream:
    """The events that one reader has still to get."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_slow = False
        """It fell behind: nothing more is put into its queue."""
        self.is_open = False
        """It has its first event, which later changes refer to."""

    def put(self, events: Sequence[bytes]) -> None:
        """Queue the events of one reading, or find that the reader is too slow."""
        # never unset: its queue has a hole from then on
        self.is_slow = self.is_slow or self.queue.qsize() > MAX_QUEUED
        if self.is_open and not self.is_slow:
            for event in events:
                self.queue.put_nowait(event)


class Events(Collector):
    """Opens and feeds the streams, and counts them.

    Args:
        observe: reads the run; raises UnavailableError.
        registry: for the metrics.
    """

    def __init__(self, observe: Callable[[], Awaitable[ObservedRun]], registry: CollectorRegistry) -> None:
        self._observe = observe
        self._reading = SingleFlight(self._read, asyncio.Lock())
        self._last: ObservedRun | None = None
        self._problem: str | None = None
        self._process = secrets.token_hex(4)
        """Part of the ids of events, since numbers begin again with each process."""
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)
        self._streams: set[Stream] = set()
        self._ended: Counter[str] = Counter(dict.fromkeys(ENDINGS, 0))
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        registry.register(self)

    async def open(self, last_event_id: str | None) -> Stream:
        """Open a stream; `close` must follow.

        It begins with the events after `last_event_id`, where they are known, else with the run as a whole.

        Raises:
            BusyError: MAX_STREAMS are open.
            UnavailableError: Redis did not answer, or the service stops.
        """
        if self._ending.is_set():
            raise UnavailableError("the buffer service stops; try again when it is back")
        if len(self._streams) >= MAX_STREAMS:
            raise BusyError(
                f"{MAX_STREAMS} streams of events are open, which is the limit; close one, or use GET /v1/run",
                retry_after_s=FULL_RETRY_S,
                wait="event-streams",
            )
        stream = Stream()
        # counted before the reading: streams that open together must not exceed the limit while they wait for it
        self._streams.add(stream)
        try:
            await self._reading.run()
        except BaseException:
            self._streams.discard(stream)
            raise
        assert self._last is not None
        missed = self._missed(last_event_id)
        for event in [self._format(whole_run(self._last))] if missed is None else missed:
            stream.queue.put_nowait(event)
        stream.is_open = True
        # the reading ends with its last follower
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="events")
        return stream

    def close(self, stream: Stream, ending: str) -> None:
        """End a stream; `ending` is one of ENDINGS."""
        if stream in self._streams:
            self._streams.discard(stream)
            self._ended[ending] += 1
            if ending == "slow":
                log.warning("event_stream_cut", reason="the reader did not take what was sent")

    async def stop(self) -> None:
        """Stop reading; streams end with their connections."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the streams."""
        yield GaugeMetricFamily("tba_event_streams", "Streams of GET /v1/events", value=len(self._streams))
        ended = CounterMetricFamily("tba_event_streams_ended", "Streams that ended, by reason", labels=["reason"])
        for reason, number in self._ended.items():
            ended.add_metric([reason], number)
        yield ended

    async def _watch(self) -> None:
        while self._streams and not self._ending.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), EVERY_S)
            try:
                await self._reading.run()
                self._report(None)
            except UnavailableError as error:
                self._report(str(error))
            except Exception:  # a defect must show in the log, and must not silence the streams
                log.exception("events_failed")
                self._report("the buffer service cannot follow the run; its log says why")

    async def _read(self) -> None:
        before, self._last = self._last, await self._observe()
        if before is not None:
            self._publish(changes(before, self._last))

    def _report(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._publish([("problem", to_json({"detail": problem}))])

    def _publish(self, found: Iterable[Change]) -> None:
        events = []
        for change in found:
            self._number += 1
            events.append(self._format(change))
            self._kept.append((self._number, events[-1]))
        for stream in self._streams if events else ():
            stream.put(events)

    def _format(self, change: Change) -> bytes:
        name: EventName = change[0]
        return format_sse_event(event=name, data_str=change[1].decode(), id=f"{self._process}-{self._number}")

    def _missed(self, last_event_id: str | None) -> list[bytes] | None:
        """Return the events after an id; None when they are not all known, or too many for a queue."""
        process, _, text = (last_event_id or "").partition("-")
        # an id of an earlier process says nothing about the events of this one
        if process != self._process or not (text.isascii() and text.isdigit()):
            return None
        number = int(text[:20])
        first = self._kept[0][0] if self._kept else self._number + 1
        if not first - 1 <= number <= self._number or self._number - number > MAX_QUEUED:
            return None
        return [event for kept, event in self._kept if kept > number]


KEEPALIVE_S = 10.0
"""After this time without an event a comment is sent, so that both sides see that the other one is there."""
SEND_S = 10.0
"""After this time in which the reader takes nothing, it is cut off."""
RENEW_S = 900.0
"""After this time a stream ends and its reader returns, so that streams that a proxy forgot end too."""
FIRST = b"retry: 1000\n\n"


class EventStreamResponse(Response):
    """Sends a stream. FastAPI's EventSourceResponse neither cuts slow readers off nor ends when the service stops.

    Args:
        events: what the stream belongs to.
        stream: opened for this answer; closed here.
        check: asked before each event and each comment; raises UnauthorizedError once the token was taken away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, stream: Stream, *, check: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stream = stream
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        ending = "client"
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            ending = await self._send_all(scope["app"].state.stopping, receive, send)
        finally:
            self._events.close(self._stream, ending)
        # A slow reader takes no last chunk either. uvicorn closes the connection of an answer that is not complete once
        # the reader has taken what was sent or is gone. So the reader sees that its stream was cut and not ended.
        if ending not in ("client", "slow"):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, server_stops: asyncio.Event, receive: Receive, send: Send) -> str:
        """Send until the stream ends; return why it does."""
        gone = asyncio.create_task(_hung_up(receive), name="event-reader")
        stopping = asyncio.create_task(server_stops.wait(), name="event-stopping")
        until_s = time.monotonic() + RENEW_S
        chunk = FIRST
        try:
            while True:
                try:
                    async with asyncio.timeout(SEND_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    return "slow"
                if gone.done():
                    return "client"
                if stopping.done():
                    return "stopping"
                # it fell behind while this chunk was sent
                if self._stream.is_slow:
                    return "slow"
                if time.monotonic() > until_s:
                    return "renewed"
                chunk = await self._next(gone, stopping)
                try:
                    # for every chunk: a token may be taken away while the stream is open
                    self._check()
                except UnauthorizedError:
                    return "unauthorized"
        finally:
            gone.cancel()
            stopping.cancel()

    async def _next(self, *endings: asyncio.Task[object]) -> bytes:
        """Return the next event, or a comment once an ending is done or nothing has come for KEEPALIVE_S."""
        event = asyncio.create_task(self._stream.queue.get(), name="next-event")
        try:
            await asyncio.wait({event, *endings}, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            return event.result() if event.done() else KEEPALIVE_COMMENT
        finally:
            # asyncio.Queue: a `get` that is cancelled has taken nothing
            event.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
