"""uvicorn's HTTP protocol with bounds on what it holds for a connection before and beside the application.

head      a request must be whole HEAD_TIMEOUT_S after its first byte, the first one after the connection; else 408.
body      bounded by the application (BodyLimit); what comes after the answer is read and thrown away, if it comes fast.
answer    a client that does not read is closed once nothing left for WRITE_STALL_S.
room      MAX_CONNECTIONS in all (waiting_room.py); who has no request under way for longest makes room.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tba.service.connection import EXTENSION, Connection
from tba.service.problems import problem_response
from tba.service.waiting_room import count_closed, room_of

MAX_HEAD_BYTES = 64 * 1024
"""So much may come that is neither the end of a head nor a part of a body: a head, trailers, a chunk extension."""
MAX_QUEUED_REQUESTS = 32
"""Pipelined requests that wait on one connection while another is answered."""
SLICE_BYTES = 16 * 1024
HEAD_TIMEOUT_S = 10.0
"""From the first byte of a request, or the connection, to the end of its head."""
MIN_DISCARD_BYTES_PER_S = 64 * 1024
"""A body that nobody reads any more is thrown away as long as it comes at least so fast."""
WRITE_STALL_S = 30.0
"""A client that takes less than MIN_READ_BYTES of its answer in this time is closed."""
MIN_READ_BYTES = 64 * 1024
FAULTS_OF_CLIENTS = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")


class _NotOfClients(logging.Filter):
    """uvicorn writes a line for each of these, so that a client could fill the log; `count_closed` says it shorter."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(FAULTS_OF_CLIENTS)


logging.getLogger("uvicorn.error").addFilter(_NotOfClients())


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes, or answers and closes, connections that would otherwise grow in memory or stay for ever outside of every
    limit of the application: endless, slow or absent heads, pipelines without end, clients that do not read.
    """

    _num_head_bytes = 0
    _num_timed_bytes = 0
    _is_in_body = False
    _has_progress = False
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection = Connection(self.give_up)
        self._room = room_of(self.server_state)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client connected; it has HEAD_TIMEOUT_S for its first request."""
        super().connection_made(transport)
        may_stay, displaced = self._room.enter(self)
        if displaced is not None:
            displaced.give_up("no-room")
        if not may_stay:
            detail = "this service has as many connections as it takes, all with requests under way; try again"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", detail, "no-room")
            return
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Either side closed it."""
        self._end_timers()
        self._room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser: slices outside of bodies, so that the bounds hold within one large read too."""
        self._num_timed_bytes += len(data)
        start = 0
        while start < len(data) and not self.transport.is_closing():
            end = len(data) if self._is_in_body else start + SLICE_BYTES
            part = data[start:end]
            start = end
            self._has_progress = False
            super().data_received(part)
            self._num_head_bytes = 0 if self._has_progress else self._num_head_bytes + len(part)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()
        if self._is_idle() and self._head_timer is None and not self.transport.is_closing():
            self._time_head()

    def on_headers_complete(self) -> None:
        """A request is known: it starts, or queues behind the one that is answered now."""
        self._has_progress = self._is_in_body = True
        if self.transport.is_closing():
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._room.work(self)
        super().on_headers_complete()
        extensions: dict[Any, Any] = dict(self.scope.get("extensions") or {})
        extensions[EXTENSION] = self._connection
        self.scope["extensions"] = extensions
        if len(self.pipeline) > MAX_QUEUED_REQUESTS:
            self.pipeline.clear()
            self.give_up("too-many-pipelined")

    def on_body(self, body: bytes) -> None:
        """Bytes of a body; the application bounds these."""
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._has_progress, self._is_in_body = True, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is written; the next request may come."""
        super().on_response_complete()
        if self._is_idle() and not self.flow.write_paused:
            self._room.rest(self)

    def pause_writing(self) -> None:
        """The client has not taken what was written to it."""
        super().pause_writing()
        self._room.work(self)  # uvloop says so after the answer is complete
        if self._write_timer is None:
            self._time_write(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has taken most of it."""
        super().resume_writing()
        if self.transport.is_closing():
            return  # once the rest is taken, which still has its deadline
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._is_idle():
            self._room.rest(self)

    def timeout_keep_alive_handler(self) -> None:
        """No further request came; what is still to be read of the last answer keeps its deadline."""
        super().timeout_keep_alive_handler()
        num_unread = self.transport.get_write_buffer_size()
        if num_unread and self._write_timer is None:
            self._time_write(num_unread)

    def shutdown(self) -> None:
        """The server stops: answers that stay open end."""
        self._connection.stopping.set()
        super().shutdown()

    def give_up(self, reason: str) -> None:
        """Close at once, whatever the client still reads or sends."""
        count_closed(reason, self.client)
        self._end_timers()
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP/1.1; or TLS, or a proxy's greeting, where plain HTTP is spoken."""
        if not self._is_idle():
            self.give_up("no-http")  # another answer is under way
            return
        self._refuse(HTTPStatus.BAD_REQUEST, "bad-request", "what came is no HTTP/1.1 request", "no-http")

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _time_head(self) -> None:
        self._num_timed_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or not self._is_idle():
            return
        if self._is_in_body:  # of a request that is answered
            if self._num_timed_bytes >= MIN_DISCARD_BYTES_PER_S * HEAD_TIMEOUT_S:
                self._time_head()
            else:
                self.give_up("slow-body")
        elif self._num_head_bytes:
            detail = f"the request did not come within {HEAD_TIMEOUT_S:g} s of its first byte; send it again"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request-timeout", detail, "slow-head")
        else:
            count_closed("idle", self.client)
            self.transport.close()

    def _time_write(self, num_unread_bytes: int) -> None:
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self._write_is_late, num_unread_bytes)

    def _write_is_late(self, num_unread_bytes: int) -> None:
        self._write_timer = None
        num_now = self.transport.get_write_buffer_size()
        if num_unread_bytes - num_now < MIN_READ_BYTES:
            self.give_up("not-reading")
        else:
            self._time_write(num_now)

    def _end_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None

    def _refuse_head(self) -> None:
        if not self._is_idle():
            self.give_up("large-head")  # another answer is under way, a second one would corrupt it
            return
        detail = f"more than {MAX_HEAD_BYTES} bytes came before the headers ended; send fewer or shorter headers"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers-too-large", detail, "large-head")

    def _refuse(self, status: HTTPStatus, slug: str, detail: str, reason: str) -> None:
        """Answer without the application, and close."""
        count_closed(reason, self.client)
        response = problem_response(status=status, slug=slug, detail=detail, headers={"connection": "close"})
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()
