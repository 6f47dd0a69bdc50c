"""One answer to GET /v1/events: sends what a stream gets until its reader hangs up or is too slow, or it must end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from fastapi import Response
from fastapi.sse import KEEPALIVE_COMMENT
from starlette.types import Receive, Scope, Send

from tba.errors import UnauthorizedError
from tba.service.connection import Connection, connection_of
from tba_buffer.events import Events, Stream

KEEPALIVE_S = 10.0
"""A comment goes out after so long without an event, so that both sides see that the other one is there."""
SEND_S = 10.0
"""A reader that takes nothing for so long is cut off."""
GIVE_UP_S = 1.0
"""A connection that was given up is gone long before that."""
RENEW_S = 900.0
"""A stream ends after so long, and its reader comes back: what a proxy forgot ends."""
FIRST = b"retry: 1000\n\n"


class EventStreamResponse(Response):
    """Sends a stream. FastAPI's own EventSourceResponse neither cuts slow readers off nor ends when the service stops.

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
        connection, ending = connection_of(scope), "client"
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            ending = await self._send_all(connection, receive, send)
        finally:
            self._events.close(self._stream, ending)
        if ending == "slow":
            connection.give_up("not-reading")
            with suppress(TimeoutError):
                await asyncio.wait_for(_hung_up(receive), GIVE_UP_S)
        elif ending != "client":
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, connection: Connection, receive: Receive, send: Send) -> str:
        """Until the stream ends; why it does."""
        gone = asyncio.create_task(_hung_up(receive), name="event-reader")
        stopping = asyncio.create_task(connection.stopping.wait(), name="event-stopping")
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
                if self._stream.is_slow:
                    return "slow"
                if time.monotonic() > until_s:
                    return "renewed"
                chunk = await self._next(gone, stopping)
                try:
                    self._check()
                except UnauthorizedError:
                    return "unauthorized"
        finally:
            gone.cancel()
            stopping.cancel()

    async def _next(self, *endings: asyncio.Task[object]) -> bytes:
        """What to send next: an event, or a comment once an ending is done or nothing has come for KEEPALIVE_S."""
        event = asyncio.create_task(self._stream.queue.get(), name="next-event")
        try:
            await asyncio.wait({event, *endings}, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            return event.result() if event.done() else KEEPALIVE_COMMENT
        finally:
            event.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
