"""The doctor before other answers than it expects: at the address of Redis no password is shown, and no defect."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tba_cli.doctor import CheckResult, run_checks
from tba_cli.doctor.checks import CHECKS
from tba_cli.doctor.target import target_of
from tests.support.buffer import make_recipe
from tests.support.waits import DEADLINE_S

PASSWORD = "a-password-of-redis"
Answer = Callable[[bytes], bytes]


@contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """A server with prepared answers; its address as the address of Redis."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while asked := client.recv(65536):
                client.sendall(answer(asked))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:  # a thread for each: a stray connection must not hold up the one of the test
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"redis://u:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}/0"
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(timeout=10)


@pytest.fixture(autouse=True)
def long_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a test runs in this process, and may be starved."""
    monkeypatch.setattr("tba_cli.doctor.checks.redis.TIMEOUT_S", DEADLINE_S)


def look(answer: Answer) -> list[CheckResult]:
    with listening(answer) as url:
        recipe = make_recipe(buffer={"redis_url": url, "url": "http://127.0.0.1:1"})
        return run_checks(target_of(recipe, service="buffer"), checks=[("redis", CHECKS["redis"])])


def bulk(text: str) -> bytes:
    return f"${len(text)}\r\n{text}\r\n".encode()


def strange_numbers(asked: bytes) -> bytes:
    if b"INFO" in asked:
        return bulk("redis_version:x.y\r\nrole:master\r\nused_memory:much\r\n")
    if b"CONFIG" in asked:
        return b"*2\r\n" + bulk("maxmemory") + bulk("all")
    return b"+OK\r\n"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda asked: b"-ERR unknown command, with args: " + asked.replace(b"\r\n", b" ") + b"\r\n", "***"),
        (lambda asked: asked.replace(b"\r\n", b" ")[20:] + b"\r\n", "this is not Redis"),
        (lambda asked: b"*1\r\n" * 100_000, "this is not Redis"),
        (strange_numbers, "which is not a number"),
    ],
    ids=["words of AUTH", "words back", "deep", "numbers"],
)
def test_what_is_no_redis_is_said_without_the_password(answer: Answer, says: str) -> None:
    found = look(answer)
    assert PASSWORD not in str(found)
    assert not [result for result in found if "broke" in result.found], found
    assert any(says in result.found and result.level == "fail" for result in found), found


def test_a_service_that_is_starting_is_of_no_other_release() -> None:
    body = b'{"type": "urn:tba:problem:not-ready", "status": 503, "detail": "reading the log"}'
    answer = b"HTTP/1.1 503 X\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with listening(lambda _: answer) as url:
        recipe = make_recipe(buffer={"url": f"http://{url.rpartition('@')[2].removesuffix('/0')}"}, reward={"port": 0})
        found = run_checks(
            target_of(recipe, service="buffer"), checks=[(name, CHECKS[name]) for name in ("releases", "services")]
        )
    assert [(each.code, each.level) for each in found][:2] == [("release", "ok"), ("service", "fail")]
    assert "answers 503: reading the log" in found[1].found


def test_without_the_client_library_redis_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_cli.doctor.checks.redis.importlib.util.find_spec", lambda name: None)
    (result,) = look(lambda asked: b"")
    assert result.level == "skip"
    assert "pip install 'tba[doctor]'" in result.found
