"""Requests that no client of ours sends: each gets a problem document that says what is wrong, and changes nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
from fastapi import FastAPI

from tba.api import Stats
from tba.server.problems import install_problem_handlers
from tests.support.buffer import begin_run, stored_run
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import ask

JSON = {"content-type": "application/json"}
LONE = "\ud800"
EVAL = {"version": "0-0", "num_prompts": 1}
PROMPT = {"prompt_id": "p", "task": "addition", "text": "1+1="}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/run", {"command": "pause", "reason": LONE}),
    ("/v1/run", {"command": "resume", "reason": LONE}),
    ("/v1/run", {"command": "stop", "reason": LONE}),
    ("/v1/run", {"command": "done", "token": LONE}),
    ("/v1/run", {"command": "fail", "token": LONE}),
    ("/v1/run", {"command": "rollback"}),
    ("/v1/run", {"command": "pause", "step": 1}),
    ("/v1/run", {"command": "unknown"}),
    ("/v1/batches", {"trainer_id": "t", "lineage": 1, "step": 1, "token": LONE}),
    ("/v1/batches/b/ack", {"lineage": 1, "step": 1, "token": LONE}),
    ("/v1/batches/b/ack", {"lineage": 1, "step": 1, "token": "t", "metrics": {LONE: 1.0}}),
    ("/v1/versions", {"version": "0-0", "token": LONE}),
    ("/v1/lineages", {"trainer_id": LONE, "parent": "0-0"}),
    ("/v1/checkpoints", {"version": "0-0", "token": "TOKEN", "key": LONE}),
    ("/v1/leases", {"searcher_id": "s", "max_leases": 1, "refused_versions": [LONE]}),
    ("/v1/leases", {"searcher_id": "s", "max_leases": 1, "refused_versions": ["0-0"] * 65}),
    ("/v1/leases/return", {"searcher_id": "s", "lease_ids": [LONE]}),
    ("/v1/leases/return", {"searcher_id": "s", "lease_ids": [], "refused_lease_ids": [LONE]}),
    ("/v1/leases/renew", {"searcher_id": "s", "lease_ids": [LONE]}),
    ("/v1/evals", {**EVAL, "token": LONE}),
    ("/v1/evals", {**EVAL, "token": "TOKEN", "num_prompts": 10**30}),
    ("/v1/prompts", {"prompts": [{**PROMPT, "data": {"answer": LONE}}]}),
    ("/v1/prompts", {"prompts": [{**PROMPT, "data": {LONE: 1}}]}),
    ("/v1/prompts", {"prompts": [{**PROMPT, "text": LONE}]}),
]


def counts(stats: Stats) -> Stats:
    """Return the stats without the parts that change by themselves."""
    return stats.model_copy(update={"rates": None})


def test_bodies_that_cannot_be_meant_are_refused_and_change_nothing(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    token = begin_run(client, 2, 2).token
    before = stored_run(client), counts(client.stats())
    wrong = []
    for path, body in BODIES:
        content = json.dumps(body).replace("TOKEN", token)
        reply = httpx2.post(client.base_url + path, content=content, headers=JSON, timeout=60)
        if reply.status_code != 422 or reply.json()["type"] != "urn:tba:problem:invalid-body":
            wrong.append((path, body, reply.status_code, reply.text))
    assert wrong == []
    assert (stored_run(client), counts(client.stats())) == before


NO_DOCUMENTS = [
    *((body, "application/json") for body in (b"", b'{"a":', b"[" * 30_000, b"\xff\xfe\xfd")),
    # an array that promises too much, and a deep one
    *((body, "application/msgpack") for body in (b"\xdd\xff\xff\xff\xff", b"\x91" * 30_000)),
]


def test_no_endpoint_takes_bytes_that_are_no_document(serve_buffer: ServeBuffer) -> None:
    with httpx2.Client(base_url=serve_buffer().url, timeout=60) as client:
        paths = client.get("/openapi.json").json()["paths"].items()
        posts = [re.sub(r"{\w+}", "x", path) for path, methods in paths if "post" in methods]
        assert len(posts) > 10
        for path in posts:
            for body, kind in NO_DOCUMENTS:
                answer = client.post(path, content=body, headers={"content-type": kind})
                assert 400 <= answer.status_code <= 422, (path, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                assert "\n" not in answer.json()["detail"]


def test_a_prompt_that_could_not_be_read_back_is_not_stored(serve_buffer: ServeBuffer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(250):
        deep = {"a": deep}
    buffer = serve_buffer()
    prompts = [{**PROMPT, "prompt_id": "good"}, {**PROMPT, "data": deep}]
    reply = httpx2.post(f"{buffer.url}/v1/prompts", json={"prompts": prompts}, timeout=60)
    assert reply.status_code in (400, 422)
    assert "nested deeper than 32 levels" in reply.json()["detail"]
    assert serve_buffer().client().stats().num_prompts_train == 0  # and a restart can read what is stored


async def test_a_text_that_cannot_be_written_is_the_fault_of_the_request() -> None:
    app = FastAPI()
    install_problem_handlers(app)

    @app.post("/")
    async def encode(body: dict[str, Any]) -> None:
        body["text"].encode()

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as client:
        reply = await client.post("/", content=json.dumps({"text": LONE}), headers=JSON)
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:tba:problem:invalid-body")
    assert reply.json()["detail"] == "a text of the request cannot be written as UTF-8: surrogates not allowed"


def test_a_ledger_position_that_no_ledger_reaches_is_refused(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    for after in ("-1", "9007199254740993", "99999999999999999999999", "x"):
        assert ask(client.base_url, f"/v1/ledger?after={after}")[0] == 422, after
    beyond = client.ledger(after=2**53)
    assert (beyond.entries, beyond.next) == ([], None)
