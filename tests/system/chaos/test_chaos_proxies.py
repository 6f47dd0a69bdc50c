"""The proxies really do what the survival table says they did, and the observer misses nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import msgspec
import pytest

from tests.support import loopback
from tests.support.buffer import make_payloads
from tests.support.waits import until
from tests.system.chaos.links import Link, Mode
from tests.system.chaos.loop_thread import LoopThread
from tests.system.chaos.observer import Observer
from tests.system.chaos.relay import Relay

SILENCE_S = 0.3


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def echo() -> Iterator[socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    def answer(sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(65536):
                    received.append(data)
                    sock.sendall(data)
            except OSError:
                return

    received.clear()
    threading.Thread(target=serve, daemon=True).start()
    yield server
    server.shutdown(socket.SHUT_RDWR)
    server.close()


received: list[bytes] = []


def open_link(loop: LoopThread, echo: socket.socket) -> tuple[Link, socket.socket]:
    link = Link("a-b", echo.getsockname()[1])
    loop.call(link.start())
    client = socket.create_connection(("127.0.0.1", link.port), timeout=30)
    client.sendall(b"before")
    assert client.recv(100) == b"before"
    return link, client


def connect_and_read(link: Link) -> bytes:
    with socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock:
        return sock.recv(100)


def test_a_cut_link_resets_what_is_open_and_what_is_opened(loop: LoopThread, echo: socket.socket) -> None:
    link, client = open_link(loop, echo)
    loop.call(link.set("cut"))
    with pytest.raises(ConnectionResetError):
        client.recv(100)
    with pytest.raises(ConnectionError):
        connect_and_read(link)
    loop.call(link.set("open"))
    with socket.create_connection(("127.0.0.1", link.port), timeout=30) as third:
        third.sendall(b"after")
        assert third.recv(100) == b"after"
    client.close()


@pytest.mark.parametrize(("mode", "arrives"), [("deaf", False), ("deaf-to", False), ("deaf-from", True)])
def test_a_deaf_link_holds_data_in_its_direction_and_delivers_it_later(
    loop: LoopThread, echo: socket.socket, mode: Mode, arrives: bool
) -> None:
    link, client = open_link(loop, echo)
    loop.call(link.set(mode))
    client.sendall(b"held")
    client.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        client.recv(100)
    if arrives:
        until("the service has it", lambda: b"held" in received)
    else:
        assert b"held" not in received
    loop.call(link.set("open"))
    client.settimeout(30)
    assert client.recv(100) == b"held"
    client.close()


class Service(loopback.Handler):
    protocol_version = "HTTP/1.1"
    pushes: list[bytes] = []

    def do_GET(self) -> None:
        self.answer(200, self.path.rpartition("/")[2].encode() * 10)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.body()
        if self.path.endswith("/ack"):
            self.send_response(204)
            self.end_headers()
            return
        ids = [msgspec.msgpack.decode(item)["rollout_id"].hex() for item in msgspec.msgpack.decode(body)["rollouts"]]
        outcomes = [{"rollout_id": name, "outcome": "duplicate" if name in self.pushes else "new"} for name in ids]
        self.pushes.extend(ids)
        self.answer(200, {"outcomes": outcomes})


@pytest.fixture
def relay(loop: LoopThread) -> Iterator[tuple[Relay, Observer]]:
    """A relay with an observer, before a service that answers as the buffer does."""
    with loopback.Server(Service) as server:
        Service.pushes.clear()
        observer = Observer()
        relay = Relay(server.server_port, observer.see)
        loop.call(relay.start())
        yield relay, observer


def ask(relay: Relay, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, int]:
    connection = HTTPConnection("127.0.0.1", relay.port, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), int(answer.headers.get("content-length") or 0)
    finally:
        connection.close()


def post(relay: Relay, path: str, body: bytes) -> tuple[int, bytes]:
    return ask(relay, "POST", path, body)[:2]


def test_the_observer_notes_every_acknowledged_rollout_and_step(relay: tuple[Relay, Observer]) -> None:
    proxy, observer = relay
    payloads = make_payloads(["a", "b"], per_prompt=2, searcher_id="s")
    body = msgspec.msgpack.encode({"schema": 1, "rollouts": payloads})
    assert post(proxy, "/v1/rollouts", body)[0] == post(proxy, "/v1/rollouts", body)[0] == 200
    assert post(proxy, "/v1/batches/b-1/ack", b'{"lineage": 2, "step": 7}')[0] == 204
    ids = {msgspec.msgpack.decode(payload)["rollout_id"] for payload in payloads}
    assert observer.rollouts.keys() == ids
    assert all(observer.rollouts.values())
    assert observer.outcomes == {"new": 4, "duplicate": 4}
    assert observer.twice_new == observer.errors == proxy.errors == []
    assert [(acked.lineage, acked.step, acked.batch_id) for acked in observer.acks_since(0)] == [(2, 7, "b-1")]
    Service.pushes.clear()  # a buffer that forgot what it stored
    post(proxy, "/v1/rollouts", body)
    assert len(observer.twice_new) == 4


def test_a_spoiled_request_does_what_its_name_says(relay: tuple[Relay, Observer]) -> None:
    proxy, observer = relay
    body = msgspec.msgpack.encode({"schema": 1, "rollouts": make_payloads(["a"], per_prompt=1)})
    proxy.spoil = "503"
    assert post(proxy, "/v1/rollouts", body)[0] == 503
    assert observer.rollouts == {}
    proxy.spoil = "lose"
    with pytest.raises((HTTPException, OSError)):
        post(proxy, "/v1/rollouts", body)
    assert len(observer.rollouts) == 1
    proxy.spoil = "half"
    with pytest.raises((HTTPException, OSError)):
        post(proxy, "/v1/rollouts", body)
    proxy.spoil = None
    assert post(proxy, "/v1/rollouts", body)[0] == 200
    assert observer.outcomes == {"new": 1, "duplicate": 2}
    assert (proxy.num_requests, proxy.num_spoiled) == (4, 3)


def test_files_of_weights_are_spoilt_as_the_fault_says_and_no_other_file_is(relay: tuple[Relay, Observer]) -> None:
    proxy, _ = relay
    folder = "/chaos/trial/runs/chaos/weights"
    paths = {
        "delta": f"{folder}/1-8/delta-00001-0a.safetensors",
        "keyframe": f"{folder}/1-0/model.safetensors",
        "checkpoint": "/chaos/trial/runs/chaos/checkpoints/objects/1-0b.safetensors",
        "manifest": f"{folder}/1-8/manifest.json",
    }
    whole = {kind: ask(proxy, "GET", path) for kind, path in paths.items()}
    assert {status for status, _, _ in whole.values()} == {200}
    spoilt: dict[str, set[str]] = {}
    for spoil in ("flip", "short", "other delta", "no delta", "no keyframe"):
        ask(proxy, "GET", f"{folder}/1-7/delta-00001-07.safetensors")
        proxy.spoil = spoil  # pyright: ignore[reportAttributeAccessIssue]
        got = {kind: ask(proxy, "GET", path) for kind, path in paths.items()}
        heads = {kind: ask(proxy, "HEAD", path) for kind, path in paths.items()}
        proxy.spoil = None
        spoilt[spoil] = {kind for kind in paths if got[kind] != whole[kind]}
        for kind in paths:
            assert got[kind][0] == heads[kind][0] == (404 if spoil == f"no {kind}" else 200)
            # what is wrong with a file must be for the reader to find, and not a broken answer
            assert got[kind][2] == heads[kind][2] == len(got[kind][1])
    weights = {"delta", "keyframe", "checkpoint"}
    assert spoilt == {
        "flip": weights,
        "short": weights,
        "other delta": {"delta"},
        "no delta": {"delta"},
        "no keyframe": {"keyframe"},
    }
    assert proxy.errors == []
