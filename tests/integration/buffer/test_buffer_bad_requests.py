"""Requests that no client of ours sends: each gets a problem document that says what is wrong, and changes nothing."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from tba.api import Stats
from tba.server.problems import install_problem_handlers
from tba.wire import encode_heartbeat, encode_push
from tests.support.buffer import begin_run, make_heartbeat, make_payloads, make_prompts, stored_run
from tests.support.buffer_fixtures import ServeBuffer

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
    buffer = serve_buffer()
    client = buffer.client()
    token = begin_run(client, 2, 2).token
    before = stored_run(client), counts(client.stats())
    wrong = []
    for path, body in BODIES:
        content = json.dumps(body).replace("TOKEN", token)
        reply = httpx2.post(buffer.url + path, content=content, headers=JSON, timeout=60)
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


def test_a_heartbeat_of_another_run_is_refused(serve_buffer: ServeBuffer) -> None:
    beat = make_heartbeat(run="another")
    headers = {"content-type": "application/msgpack"}
    url = f"{serve_buffer().url}/v1/heartbeats"
    assert httpx2.post(url, content=encode_heartbeat(beat), headers=headers, timeout=60).status_code == 409


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


@pytest.mark.parametrize("after", ["-1", "9007199254740993", "99999999999999999999999", "x"])
def test_a_ledger_position_that_no_ledger_reaches_is_refused(serve_buffer: ServeBuffer, after: str) -> None:
    reply = httpx2.get(f"{serve_buffer().url}/v1/ledger", params={"after": after}, timeout=60)
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:tba:problem:invalid-body")


def test_the_ledger_after_its_end_is_empty(serve_buffer: ServeBuffer) -> None:
    reply = serve_buffer().client().ledger(after=2**53)
    assert (reply.entries, reply.next) == ([], None)


def answer_to(url: str, sent: bytes, *, then_for_ever: bytes = b"") -> tuple[bytes, int]:
    """Send on a raw connection; return the answer until the close, and the number of bytes that could be sent."""
    num_sent, answer = 0, b""
    with socket.create_connection(parse_address(url), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            while then_for_ever and not select.select([connection], [], [], 0)[0]:
                num_sent += connection.send(then_for_ever)
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(65536):
                answer += received
                if not then_for_ever and b"}" in answer:
                    break
    return answer, num_sent


def parse_address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def test_a_body_over_the_limit_is_refused_before_it_is_sent(serve_buffer: ServeBuffer) -> None:
    url = serve_buffer(buffer={"max_body_bytes": 4096}).url
    head = b"POST /v1/rollouts HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n"
    answer, _ = answer_to(url, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in answer
    assert b"the body has 1000000000000 bytes or more, the limit is 4096" in answer


def test_a_body_without_a_declared_size_is_cut_off_at_the_limit(serve_buffer: ServeBuffer) -> None:
    url = serve_buffer(buffer={"max_body_bytes": 4096}).url
    head = b"POST /v1/rollouts HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer, num_sent = answer_to(url, head, then_for_ever=b"400\r\n" + b"x" * 1024 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert num_sent < 64 * 2**20  # the capacity of the sockets, not a stream that never ends


def test_a_client_that_stops_in_the_middle_of_a_body_changes_nothing(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer()
    buffer.client().upload_prompts(make_prompts(1))
    body = encode_push(make_payloads(["train-0"]))
    head = f"POST /v1/rollouts HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for end in (0, 1, len(body) // 2, len(body) - 1):
        with socket.create_connection(parse_address(buffer.url), timeout=30) as connection:
            connection.sendall(head + body[:end])
    assert buffer.client().stats().num_rollouts == 0
    answer, _ = answer_to(buffer.url, head + body)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert buffer.client().stats().num_rollouts == 4
