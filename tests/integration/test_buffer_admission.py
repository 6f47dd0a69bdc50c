"""Pushes under way are bounded in bytes: beyond the bound a push is asked to come back before its body is read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tba.errors import BusyError
from tba.wire import encode_push
from tests.support.buffer import make_payloads, make_prompts
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.waiting import until

LIMIT = 20_000


@contextmanager
def half_a_push(buffer: BufferThread, body: bytes, *, length: int | None) -> Iterator[socket.socket]:
    """A client that stops half-way; without a length it says that it sends chunks."""
    host, port = buffer.url.removeprefix("http://").split(":")
    how = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"POST /v1/rollouts HTTP/1.1\r\nhost: x\r\n{how}\r\n\r\n".encode())
        sock.sendall((b"%x\r\n%s\r\n" % (len(body), body)) if length is None else body)
        yield sock


def is_busy(buffer: BufferThread, payloads: list[bytes]) -> BusyError | None:
    try:
        buffer.client().push(payloads)
    except BusyError as busy:
        return busy
    return None


@pytest.mark.parametrize("declared", [True, False])
def test_a_push_beyond_the_bound_comes_back_and_is_stored_later(serve_buffer: ServeBuffer, declared: bool) -> None:
    buffer = serve_buffer(buffer={"max_inflight_bytes": LIMIT, "max_body_bytes": 2_000_000})
    client = buffer.client()
    client.upload_prompts(make_prompts(1))
    payloads = make_payloads(["train-0"])
    body = encode_push(payloads)
    with half_a_push(buffer, body[:100], length=LIMIT - 100 if declared else None):
        busy = until("refused", lambda: is_busy(buffer, payloads))
        assert busy is not None
        assert busy.wait == "push-memory"
        assert busy.retry_after_s == 0.5
        large = make_payloads(["train-0"], num_tokens=40_000)  # more than the sockets hold, not read, and yet answered
        with pytest.raises(BusyError):
            client.push(large)
    until("the slow client is gone", lambda: is_busy(buffer, payloads) is None)
    client.push(payloads)
    assert client.stats().num_rollouts == len(payloads)


def test_a_body_that_is_alone_is_admitted_whatever_its_size(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(buffer={"max_inflight_bytes": 1024}).client()
    client.upload_prompts(make_prompts(1))
    for _ in range(3):  # and what it took is given back
        client.push(make_payloads(["train-0"], num_tokens=500))
    assert client.stats().num_rollouts == 12
