"""Bearer tokens: who may call what."""

from __future__ import annotations

import pytest

from tba.api import BatchRequest, LeaseRequest, RunCommand
from tba.errors import BusyError, FencedError, UnauthorizedError
from tests.support.buffer import make_payloads, make_prompts, start_lineage
from tests.support.buffer_fixtures import ServeBuffer

TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}


def test_every_role_may_do_its_work_and_nothing_else(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    clients = {role: buffer.client(token=token) for role, token in TOKENS.items()}
    calls = {
        "upload": (lambda c: c.upload_prompts(make_prompts(2)), {"operator"}),
        "pause": (lambda c: c.command("pause", RunCommand(token="stale")), {"operator", "trainer"}),
        "resume": (lambda c: c.command("resume", RunCommand()), {"operator"}),
        "lineage": (lambda c: start_lineage(c), {"trainer"}),
        "draw": (
            lambda c: c.draw_batch(BatchRequest(trainer_id="t", lineage=1, step=1, token="stale")),
            {"trainer"},
        ),
        "done": (lambda c: c.command("done", RunCommand(token="stale")), {"trainer"}),
        "push": (lambda c: c.push(make_payloads(["train-0"])), {"searcher"}),
        "lease": (lambda c: c.lease(LeaseRequest(searcher_id="s", max_leases=1)), {"searcher"}),
        "stats": (lambda c: c.stats(), {"viewer", "operator", "trainer"}),
        "sample": (lambda c: c.sample(1), {"viewer", "operator", "trainer"}),
        "ledger": (lambda c: c.ledger(), {"viewer", "operator", "trainer"}),
        "run": (lambda c: c.run(), {"viewer", "operator", "trainer", "searcher"}),
    }
    for name, (call, allowed) in calls.items():
        for role, client in clients.items():
            try:
                call(client)
                passed = True
            except (FencedError, BusyError):
                passed = True
            except UnauthorizedError:
                passed = False
            assert passed == (role in allowed), f"{role} and {name}"


def test_a_trainer_pauses_with_the_living_token_only_and_an_operator_without(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(tokens=TOKENS)
    trainer, operator = (buffer.client(token=TOKENS[role]) for role in ("trainer", "operator"))
    lineage = start_lineage(trainer)
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
