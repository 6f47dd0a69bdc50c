"""Roles and rate limits of a buffer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tba.api import (
    BatchRequest,
    EvalRequest,
    LeaseRequest,
    RescoreRequest,
    RollbackRequest,
    RunCommand,
    ScaleRequest,
    SettingsRequest,
)
from tba.clients import BufferClient
from tba.config import parse_live
from tba.errors import BusyError, ConflictError, FencedError, NotFoundError, UnauthorizedError
from tba.wire import encode_push
from tests.support.buffer import make_payloads, make_prompts, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.waits import until

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}


def test_every_role_may_do_its_work_and_nothing_else(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    clients = {role: buffer.client(token=token) for role, token in TOKENS.items()}
    change = SettingsRequest(settings=parse_live({"beta": 1}), token="stale")
    calls = {
        "upload": (lambda c: c.upload_prompts(make_prompts(2)), {"operator"}),
        "pause": (lambda c: c.command("pause", RunCommand(token="stale")), {"operator", "trainer"}),
        "change settings": (lambda c: c.change_settings(change), {"operator", "trainer"}),
        "resume": (lambda c: c.command("resume", RunCommand()), {"operator"}),
        "lineage": (lambda c: start_lineage(c), {"trainer"}),
        "draw": (lambda c: c.draw_batch(BatchRequest(trainer_id="t", lineage=1, step=1, token="stale")), {"trainer"}),
        "done": (lambda c: c.command("done", RunCommand(token="stale")), {"trainer"}),
        "fail": (lambda c: c.command("fail", RunCommand(token="stale")), {"trainer"}),
        "accept loss": (lambda c: c.command("accept-loss", RunCommand()), {"operator"}),
        "roll back": (lambda c: c.rollback(RollbackRequest(step=0)), {"operator"}),
        "push": (lambda c: c.push(make_payloads(["train-0"])), {"searcher"}),
        "lease": (lambda c: c.lease(LeaseRequest(searcher_id="s", max_leases=1)), {"searcher"}),
        "stats": (lambda c: c.stats(), {"viewer", "operator", "trainer"}),
        "curves": (lambda c: c.curves(), {"viewer", "operator", "trainer"}),
        "settings": (lambda c: c.settings(), {"viewer", "operator", "trainer"}),
        "scaling": (lambda c: c.scaling(), {"viewer", "operator", "trainer"}),
        "scale": (lambda c: c.scale(ScaleRequest(num_searchers=1)), {"operator"}),
        "start to rescore": (lambda c: c.start_rescore(RescoreRequest()), {"operator"}),
        "rescore": (lambda c: c.rescore(), {"viewer", "operator"}),
        "evaluate": (lambda c: c.request_eval(EvalRequest(version="0-0", token="stale")), {"operator", "trainer"}),
        "prompts": (lambda c: c.list_prompts(), {"viewer", "operator"}),
        "prompt": (lambda c: c.get_prompt("train-0"), {"viewer", "operator"}),
        "ledger": (lambda c: c.ledger(), {"viewer", "operator", "trainer"}),
        "run": (lambda c: c.run(), {"viewer", "operator", "trainer", "searcher"}),
    }
    for name, (call, allowed) in calls.items():
        for role, client in clients.items():
            try:
                call(client)
                passed = True
            except (FencedError, BusyError, ConflictError, NotFoundError):
                passed = True
            except UnauthorizedError:
                passed = False
            assert passed == (role in allowed), f"{role} and {name}"


def test_a_trainer_changes_a_run_with_the_valid_token_only_and_an_operator_without(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    trainer, operator = (buffer.client(token=TOKENS[role]) for role in ("trainer", "operator"))
    lineage = start_lineage(trainer)

    def change(client: BufferClient, token: str | None = None) -> str:
        request = SettingsRequest(settings=parse_live({"beta": 1}), token=token)
        return client.change_settings(request).changes[0].role

    with pytest.raises(UnauthorizedError, match="fencing token"):
        change(trainer)
    with pytest.raises(FencedError, match="newer trainer start"):
        change(trainer, "stale")
    assert (change(trainer, lineage.token), change(operator)) == ("trainer", "operator")
    with pytest.raises(UnauthorizedError, match="'pause' with its fencing token only; send `token`"):
        trainer.command("pause", RunCommand())
    with pytest.raises(FencedError, match="newer trainer start"):
        trainer.command("pause", RunCommand(token="stale"))
    assert trainer.run().state == "running"
    assert trainer.command("pause", RunCommand(token=lineage.token)).state == "paused"
    assert operator.command("resume", RunCommand()).state == "running"
    assert operator.command("pause", RunCommand()).state == "paused"


def test_no_token_and_a_wrong_token_are_refused(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    for token in (None, "guess"):
        with pytest.raises(UnauthorizedError, match="bearer token"):
            buffer.client(token=token).run()


LIMIT = 20_000


@contextmanager
def half_a_push(buffer: BufferThread, body: bytes, *, length: int | None) -> Iterator[socket.socket]:
    """A client that stops half-way; without a length it says that it sends chunks."""
    host, port = buffer.url.removeprefix("http://").split(":")
    how = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"POST /v1/rollouts HTTP/1.1\r\nhost: localhost\r\n{how}\r\n\r\n".encode())
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
    buffer = serve_buffer(buffer={"MAX_INFLIGHT_BYTES": LIMIT, "max_body_bytes": 2_000_000})
    client = buffer.with_prompts(1)
    payloads = make_payloads(["train-0"])
    body = encode_push(payloads)
    with half_a_push(buffer, body[:100], length=LIMIT - 100 if declared else None):
        busy = until("refused", lambda: is_busy(buffer, payloads))
        assert busy is not None
        assert (busy.wait, busy.retry_after_s) == ("push-memory", 0.5)
        large = make_payloads(["train-0"], num_tokens=40_000)  # more than the sockets hold, not read, and yet answered
        with pytest.raises(BusyError):
            client.push(large)
    until("the slow client is gone", lambda: is_busy(buffer, payloads) is None)
    client.push(payloads)
    assert client.stats().num_rollouts == len(payloads)


def test_a_body_that_is_alone_is_admitted_whatever_its_size(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(buffer={"MAX_INFLIGHT_BYTES": 1024}).with_prompts(1)
    for _ in range(3):  # and what it took is given back
        client.push(make_payloads(["train-0"], num_tokens=500))
    assert client.stats().num_rollouts == 12
