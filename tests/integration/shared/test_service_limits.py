"""Clients that idle, do not read, speak no HTTP or have no token cost a service little; over real sockets."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tba.clients.service_client import ServiceClient
from tba.server import auth
from tests.support.served_app import LARGE_BYTES, ServedApp
from tests.support.waits import until

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer")}
NUM_IDLE = 400


@pytest.fixture
def served() -> Iterator[ServedApp]:
    with ServedApp(TOKENS) as app:
        yield app


def get(path: str, token: str = TOKENS["searcher"], *more: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {token}", *more, "", ""]
    return "\r\n".join(lines).encode()


def read_all(sock: socket.socket) -> bytes:
    """Read until the other side closes."""
    read = bytearray()
    try:
        while part := sock.recv(2**20):
            read += part
    except ConnectionError:  # closed with bytes unread
        pass
    return bytes(read)


def small(served: ServedApp) -> None:
    """A well-behaved client is served, over a connection of its own."""
    client = ServiceClient(served.url, token=TOKENS["searcher"], retry_s=0, timeout_s=60)
    try:
        assert json.loads(client._call("GET", "/v1/small").content) == {"status": "ok"}
    finally:
        client.close()


def metric(served: ServedApp, line: str) -> float:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return float(next((found.rsplit(" ", 1)[1] for found in lines if found.startswith(f"{line} ")), 0))


def test_hundreds_of_idle_connections_hold_up_nobody(served: ServedApp) -> None:
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(served.connect())
        until("all are accepted", lambda: served.num_connections >= NUM_IDLE)
        for _ in range(20):
            small(served)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n\r\n"], ids=["tls", "proxy"]
)
def test_what_is_no_http_is_refused(served: ServedApp, sent: bytes) -> None:
    with served.connect() as sock:
        sock.sendall(sent)
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")


def test_an_upgrade_to_a_websocket_is_an_ordinary_request(served: ServedApp) -> None:
    with served.connect() as sock:
        upgrade = ("upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: MDEyMzQ1Njc4OTAxMjM0NQ==")
        sock.sendall(get("/v1/small", TOKENS["searcher"], "connection: upgrade", *upgrade))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_holds_up_nobody(served: ServedApp) -> None:
    with served.connect() as sock:
        sock.sendall(get("/v1/large"))
        until("it is connected", lambda: served.num_connections == 1)
        for _ in range(20):
            small(served)


@pytest.mark.parametrize("more", [(), ("connection: close",)], ids=["kept", "closed"])
def test_a_client_that_reads_slowly_gets_everything(served: ServedApp, more: tuple[str, ...]) -> None:
    served.server.config.timeout_keep_alive = 1  # does not cut an answer short that is still being read
    num_read = 0
    with served.connect() as sock:
        sock.sendall(get("/v1/large", TOKENS["searcher"], *more))
        started_s = time.monotonic()
        while part := sock.recv(2**20):
            num_read += len(part)
            if time.monotonic() - started_s < 1.5:
                time.sleep(0.1)
    assert num_read > LARGE_BYTES


def test_more_connections_than_there_may_be_are_refused_and_the_others_served() -> None:
    with ServedApp(TOKENS, limit_concurrency=4) as served, ExitStack() as stack:
        working = stack.enter_context(served.connect())
        working.sendall(get("/v1/large"))
        num_read = len(working.recv(100))  # the answer is under way
        idle = [stack.enter_context(served.connect()) for _ in range(4)]
        until("all are accepted", lambda: served.num_connections == 5)
        idle[0].sendall(get("/v1/small"))
        assert read_all(idle[0]).startswith(b"HTTP/1.1 503 ")
        while num_read < LARGE_BYTES:
            part = working.recv(2**20)
            assert part, "the connection that works was closed"
            num_read += len(part)
        for sock in idle:
            sock.close()
        until("they are gone", lambda: served.num_connections <= 1)
        small(served)


def test_a_flood_without_a_token_is_slowed_down_and_others_are_not(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "DELAY_S", 600.0)
    with ExitStack() as stack:
        for _ in range(auth.FREE_REFUSALS):
            sock = stack.enter_context(served.connect())
            sock.sendall(get("/v1/small", "a-wrong-token-0123"))
            assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")
        held = [stack.enter_context(served.connect()) for _ in range(30)]
        for sock in held:
            sock.sendall(get("/v1/small", "a-wrong-token-0123"))
        with ThreadPoolExecutor(4) as pool:  # the same address, with a token
            list(pool.map(lambda _: small(served), range(20)))
        for sock in held:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
    assert metric(served, "tba_unauthorized_total") == auth.FREE_REFUSALS + 30
