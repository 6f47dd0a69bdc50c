"""The streams of GET /v1/events: one look at the run every EVERY_S, and only while somebody follows, serves them all.

Each stream has a queue; the events themselves are shared. A reader that is more than MAX_QUEUED events behind when the
next look has found something is cut off: it comes back with Last-Event-ID and gets what it missed, while that is known,
else the run as a whole. So no stream holds more than MAX_QUEUED events and those of one look.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from fastapi.sse import format_sse_event
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import to_json

from tba.api.events import EventName
from tba.errors import BusyError, UnavailableError
from tba.logs import get_logger
from tba_buffer.coalesce import Coalesced
from tba_buffer.event_changes import Change, Look, changes, whole

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
    """What one reader still has to get."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_slow = False
        """It fell behind; nothing more is put into its queue."""
        self.is_open = False
        """It has its first event, so changes make sense to it."""

    def put(self, events: Sequence[bytes]) -> None:
        """Queue the events of one look, or find that the reader is too slow."""
        self.is_slow = self.is_slow or self.queue.qsize() > MAX_QUEUED
        if self.is_open and not self.is_slow:
            for event in events:
                self.queue.put_nowait(event)


class Events(Collector):
    """Opens and feeds the streams, and counts them.

    Args:
        look: reads the run; raises UnavailableError.
        registry: for the metrics.
    """

    def __init__(self, look: Callable[[], Awaitable[Look]], registry: CollectorRegistry) -> None:
        self._read = look
        self._looking = Coalesced(self._look, asyncio.Lock())
        self._last: Look | None = None
        self._trouble: str | None = None
        self._life = secrets.token_hex(4)
        """Ids of events are of one process."""
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)
        self._streams: set[Stream] = set()
        self._ended: Counter[str] = Counter(dict.fromkeys(ENDINGS, 0))
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        registry.register(self)

    async def open(self, last_event_id: str | None) -> Stream:
        """A stream that begins with the run as a whole, or with what came after `last_event_id` where that is known.
        `close` must follow.

        Raises:
            BusyError: MAX_STREAMS are open.
            UnavailableError: Redis did not answer, or the service stops.
        """
        if self._ending.is_set():
            raise UnavailableError("the buffer service stops; try again when it is back")
        if len(self._streams) >= MAX_STREAMS:
            raise BusyError(
                f"{MAX_STREAMS} streams of events are open, which is the most; close one, or ask GET /v1/run",
                retry_after_s=FULL_RETRY_S,
                wait="event-streams",
            )
        stream = Stream()
        self._streams.add(stream)
        try:
            await self._looking.run()
        except BaseException:
            self._streams.discard(stream)
            raise
        assert self._last is not None
        missed = self._missed(last_event_id)
        for event in [self._format(whole(self._last))] if missed is None else missed:
            stream.queue.put_nowait(event)
        stream.is_open = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="events")
        return stream

    def close(self, stream: Stream, ending: str) -> None:
        """The stream is over; `ending` is one of ENDINGS."""
        if stream in self._streams:
            self._streams.discard(stream)
            self._ended[ending] += 1
            if ending == "slow":
                log.warning("event_stream_cut", reason="the reader did not take what was sent")

    async def stop(self) -> None:
        """End the looking; streams end with their connections."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)

    def collect(self) -> Iterator[Metric]:
        """The metrics of the streams."""
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
                await self._looking.run()
                self._say_trouble(None)
            except UnavailableError as error:
                self._say_trouble(str(error))
            except Exception:  # a defect must show in the log, and must not silence the streams
                log.exception("events_failed")
                self._say_trouble("the buffer service cannot tell what happens; its log has more")

    async def _look(self) -> None:
        before, self._last = self._last, await self._read()
        if before is not None:
            self._publish(changes(before, self._last))

    def _say_trouble(self, trouble: str | None) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._publish([("trouble", to_json({"detail": trouble}))])

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
        return format_sse_event(event=name, data_str=change[1].decode(), id=f"{self._life}-{self._number}")

    def _missed(self, last_event_id: str | None) -> list[bytes] | None:
        """The events after an id; None when they are not all known, or too many for a queue."""
        life, _, text = (last_event_id or "").partition("-")
        if life != self._life or not (text.isascii() and text.isdigit()):
            return None
        number = int(text[:20])
        first = self._kept[0][0] if self._kept else self._number + 1
        if not first - 1 <= number <= self._number or self._number - number > MAX_QUEUED:
            return None
        return [event for kept, event in self._kept if kept > number]
