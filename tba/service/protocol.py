"""uvicorn's HTTP protocol with bounds on what it holds for a request before the application sees it."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tba.logs import get_logger
from tba.service.problems import problem_response

MAX_HEAD_BYTES = 64 * 1024
"""So much may come that is neither the end of a head nor a part of a body: a head, trailers, a chunk extension."""
MAX_QUEUED_REQUESTS = 32
"""Pipelined requests that wait on one connection while another is answered."""
SLICE_BYTES = 16 * 1024
log = get_logger("http")


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to endless headers and closes connections that pipeline without end.

    Both would otherwise grow in memory, outside of every limit of the application, and hold up the event loop.
    """

    _num_head_bytes = 0
    _is_in_body = False
    _has_progress = False

    def data_received(self, data: bytes) -> None:
        """Feed the parser: slices outside of bodies, so that the bounds hold within one large read too."""
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

    def on_headers_complete(self) -> None:
        """A request is known: it starts, or queues behind the one that is answered now."""
        self._has_progress = self._is_in_body = True
        if self.transport.is_closing():
            return
        super().on_headers_complete()
        if len(self.pipeline) > MAX_QUEUED_REQUESTS:
            log.warning("connection_closed", reason="too many pipelined requests", client=self.client)
            self.pipeline.clear()
            self.transport.abort()  # close() would wait for a client that does not read

    def on_body(self, body: bytes) -> None:
        """Bytes of a body; the application bounds these."""
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._has_progress, self._is_in_body = True, False
        super().on_message_complete()

    def _refuse_head(self) -> None:
        log.warning("connection_closed", reason="headers too large", client=self.client)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # another answer is under way, a second one would corrupt it
            return
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        response = problem_response(
            status=status,
            slug="headers-too-large",
            detail=f"more than {MAX_HEAD_BYTES} bytes came before the headers ended; send fewer or shorter headers",
            headers={"connection": "close"},
        )
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()
