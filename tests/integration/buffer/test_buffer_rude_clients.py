"""Clients whose bodies stall, that pipeline, or that carry no token cost the buffer next to nothing."""

from __future__ import annotations

import contextlib
import json
import select
import socket

import pytest

from tba.server import app as service_app
from tba.wire import encode_push
from tests.support.buffer import make_payloads, make_prompts
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.waits import until

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}


def connect(buffer: BufferThread) -> socket.socket:
    host, port = buffer.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_all(sock: socket.socket) -> bytes:
    """Read until the other side closes."""
    read = b""
    with contextlib.suppress(ConnectionError):  # closed with bytes unread
        while part := sock.recv(65536):
            read += part
    return read


def read_reply(sock: socket.socket) -> bytes:
    """One reply, head and body, of a connection that stays open: the two may arrive apart."""
    read = b""
    while b"\r\n\r\n" not in read:
        read += sock.recv(65536)
    top, _, body = read.partition(b"\r\n\r\n")
    num_bytes = next(
        int(v) for k, _, v in (line.partition(b":") for line in top.split(b"\r\n")) if k == b"content-length"
    )
    while len(body) < num_bytes:
        body += sock.recv(65536)
    return top + b"\r\n\r\n" + body


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", *lines, "", ""]).encode()


def problem_of(reply: bytes) -> dict[str, object]:
    top, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/problem+json" in top
    return json.loads(body)


def test_a_stalled_body_is_given_up_and_what_it_held_is_free(
    serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_app, "BODY_IDLE_S", 1.0)
    buffer = serve_buffer(buffer={"MAX_INFLIGHT_BYTES": 20_000, "max_body_bytes": 2_000_000})
    client = buffer.with_prompts(1)
    with connect(buffer) as sock:
        sock.sendall(head("/v1/rollouts", "content-length: 19999") + b"\x82")
        reply = read_all(sock)  # the server closes
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in reply
        assert "1 bytes" in str(problem_of(reply)["detail"])
        client.push(make_payloads(["train-0"]))
    with connect(buffer) as sock:  # JSON bodies, that FastAPI reads, too
        sock.sendall(head("/v1/leases", "content-type: application/json", "content-length: 100") + b"{")
        assert problem_of(read_all(sock))["status"] == 408


def test_a_body_that_drips_is_given_up(serve_buffer: ServeBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_app, "BODY_IDLE_S", 0.5)
    buffer = serve_buffer()
    with connect(buffer) as sock:
        sock.sendall(head("/v1/rollouts", "content-length: 1000000"))
        sock.settimeout(0.1)

        def drip() -> bytes | None:
            try:
                sock.sendall(b"\x82")
                return sock.recv(65536)
            except TimeoutError:
                return None

        reply = until("answered although bytes keep coming", drip)
        assert reply is not None
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_long_heads_and_large_bodies_pass(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    client = buffer.with_prompts(1)
    client.push(make_payloads(["train-0"], num_tokens=40_000))
    with connect(buffer) as sock:
        ask = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 48 * 1024 + b"\r\n"
        sock.sendall(ask + b"\r\n")
        assert read_reply(sock).startswith(b"HTTP/1.1 200 ")
        sock.sendall(ask + b"connection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", ["content-length: 1000000000000", "transfer-encoding: chunked"])
def test_a_body_over_the_limit_is_refused_as_soon_as_it_shows(serve_buffer: ServeBuffer, line: str) -> None:
    buffer, num_sent = serve_buffer(buffer={"max_body_bytes": 4096}), 0
    with connect(buffer) as sock:
        sock.sendall(head("/v1/rollouts", line))
        with contextlib.suppress(ConnectionError):
            while "chunked" in line and not select.select([sock], [], [], 0)[0]:
                num_sent += sock.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert num_sent < 64 * 2**20  # the capacity of the sockets, not a stream that never ends
    if not num_sent:
        assert b"connection: close\r\n" in reply
        assert b"the body has 1000000000000 bytes or more, the limit is 4096" in reply


def test_a_client_that_stops_in_the_middle_of_a_body_changes_nothing(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    buffer.client().upload_prompts(make_prompts(1))
    body = encode_push(make_payloads(["train-0"]))
    top = head("/v1/rollouts", f"content-length: {len(body)}")
    for end in (0, 1, len(body) // 2, len(body) - 1):
        with connect(buffer) as sock:
            sock.sendall(top + body[:end])
    assert buffer.client().stats().num_rollouts == 0
    with connect(buffer) as sock:
        sock.sendall(top + body)
        assert read_reply(sock).startswith(b"HTTP/1.1 200 ")
    assert buffer.client().stats().num_rollouts == 4


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/rollouts"])
def test_without_a_token_no_body_is_waited_for(serve_buffer: ServeBuffer, path: str) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    for line in ("x-none: 1", "authorization: Bearer guess", "authorization: Bearer \xe9"):
        with connect(buffer) as sock:
            sock.sendall(head(path, line, "content-type: application/json", "content-length: 8000000") + b"{")
            reply = sock.recv(65536)
            assert reply.startswith(b"HTTP/1.1 401 ")
            assert b'www-authenticate: Bearer error="invalid_token"' in reply
            assert b"application/problem+json" in reply
    with connect(buffer) as sock:  # public endpoints stay open
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


def test_a_slash_too_many_is_not_found_and_leads_nowhere(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    with connect(buffer) as sock:
        sock.sendall(b"GET /v1/stats/ HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 404 ")
    assert b"evil.example" not in reply
