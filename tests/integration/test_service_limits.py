"""What abusive clients cost a service: idle and slow connections, clients that do not read, floods without a token.
Real sockets; the deadlines of the service are shortened, those of the tests are generous."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from tba.clients.http import ServiceClient
from tba.service import protocol, strangers, waiting_room
from tests.support.served_app import LARGE_BYTES, ServedApp
from tests.support.waiting import until

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer")}
NUM_IDLE = 400


@pytest.fixture
def served() -> Iterator[ServedApp]:
    with ServedApp(TOKENS) as app:
        yield app


def get(path: str, token: str = TOKENS["searcher"], *more: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: x", f"authorization: Bearer {token}", *more, "", ""]
    return "\r\n".join(lines).encode()


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
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


def test_hundreds_of_idle_connections_are_closed_and_hold_up_nobody(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = metric(served, 'tba_connections_closed_total{reason="idle"}')
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 2.0)
    with ExitStack() as stack:
        idle = [stack.enter_context(served.connect()) for _ in range(NUM_IDLE)]
        num_before = int(before)
        until(
            "all are accepted",
            lambda: served.num_connections + waiting_room._closed["idle"] - num_before >= NUM_IDLE,
        )
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 60.0)
        for _ in range(20):
            small(served)
        assert all(read_all(sock) == b"" for sock in idle), "closed without a word"
        until("no idle connection is left", lambda: served.num_connections == 0)
    assert metric(served, 'tba_connections_closed_total{reason="idle"}') >= before + NUM_IDLE


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n\r\n"], ids=["tls", "proxy"]
)
def test_what_is_no_http_gets_a_problem_document(served: ServedApp, sent: bytes) -> None:
    with served.connect() as sock:
        sock.sendall(sent)
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"urn:tba:problem:bad-request" in reply


def test_an_upgrade_to_a_websocket_is_an_ordinary_request(served: ServedApp) -> None:
    with served.connect() as sock:
        upgrade = ("upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: MDEyMzQ1Njc4OTAxMjM0NQ==")
        sock.sendall(get("/v1/small", TOKENS["searcher"], "connection: upgrade", *upgrade))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: "], ids=["path", "header"])
def test_a_head_that_drips_is_given_up(served: ServedApp, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)

    def reply() -> bytes:
        with served.connect() as sock:
            sock.sendall(start)
            sock.settimeout(0.1)

            def drip() -> bytes | None:
                try:
                    sock.sendall(b"a")
                    return sock.recv(65536) or b"closed"
                except TimeoutError:
                    return None
                except ConnectionError:
                    return b"closed"

            return until("answered although bytes keep coming", drip) or b""

    def is_refused() -> bool:
        answer = reply()  # closed without a word where a slow machine sent the first byte too late
        return answer.startswith(b"HTTP/1.1 408 ") and b"urn:tba:problem:request-timeout" in answer

    until("a head that has begun is answered", is_refused)


def test_the_next_head_on_a_kept_connection_has_the_same_deadline(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.connect() as sock:
        sock.sendall(get("/v1/small"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)
        sock.sendall(b"GET /v1/sm")
        assert b"HTTP/1.1 408 " in read_all(sock)


def test_a_body_that_drips_after_its_answer_is_given_up(served: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.connect() as sock:
        sock.sendall(get("/v1/small", "no-such-token", "content-length: 1000000"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)
        sock.settimeout(0.1)

        def drip() -> bool:
            try:
                sock.sendall(b"a")
                return sock.recv(65536) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        until("closed although bytes keep coming", drip)


def test_a_client_that_does_not_read_is_closed(served: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_S", 1.0)
    with served.connect() as sock:
        sock.sendall(get("/v1/large"))
        until("it is connected", lambda: served.num_connections == 1)
        until("the connection is closed", lambda: served.num_connections == 0)
        assert len(read_all(sock)) < LARGE_BYTES
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


def test_only_a_client_that_makes_no_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    loop, transport = Mock(), Mock()
    loop.call_later.side_effect = lambda _, what, *arguments: left.append((what, arguments))
    config = uvicorn.Config(Mock(), log_config=None, ws="none")
    connection = protocol.BoundedHttpProtocol(config, ServerState(), {}, loop)
    connection.transport, connection.flow = transport, FlowControl(transport)
    for num_unread in (10 * protocol.MIN_READ_BYTES, 9 * protocol.MIN_READ_BYTES, 8 * protocol.MIN_READ_BYTES):
        transport.get_write_buffer_size.return_value = num_unread
        if not left:
            connection.pause_writing()
        else:
            what, arguments = left.pop()
            what(*arguments)
    assert not transport.abort.called
    transport.get_write_buffer_size.return_value -= protocol.MIN_READ_BYTES - 1
    what, arguments = left.pop()
    what(*arguments)
    assert transport.abort.called


def test_when_the_room_is_full_those_who_do_nothing_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "MAX_CONNECTIONS", 50)
    with ServedApp(TOKENS) as served, ExitStack() as stack:
        working = stack.enter_context(served.connect())
        working.sendall(get("/v1/large"))
        num_read = len(working.recv(100))  # the answer is under way
        idle = [stack.enter_context(served.connect()) for _ in range(80)]
        for _ in range(20):
            small(served)
        until("the room holds its number", lambda: served.num_connections <= 50)
        assert read_all(idle[0]) == b"", "the oldest idle one went"
        while num_read < LARGE_BYTES:  # the one that works stays, however old it is
            part = working.recv(2**20)
            assert part, "the connection that works was closed"
            num_read += len(part)


def test_a_room_of_connections_that_all_work_refuses_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "MAX_CONNECTIONS", 3)
    with ServedApp(TOKENS) as served, ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(served.connect())
            sock.sendall(get("/v1/large"))
            assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        with served.connect() as sock:
            assert read_all(sock).startswith(b"HTTP/1.1 503 ")
    assert waiting_room._closed["no-room"] >= 1


def test_a_flood_without_a_token_is_slowed_down_and_others_are_not(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "HOLD_S", 600.0)
    with ExitStack() as stack:
        for _ in range(strangers.FREE_REFUSALS):
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
    assert metric(served, "tba_unauthorized_total") == strangers.FREE_REFUSALS + 30
