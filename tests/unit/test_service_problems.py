"""Problem documents of requests that do not fit: each names the field and the value, in bounded space."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import FastAPI, Query

from tba.api import BatchRequest
from tba.server.problems import install_problem_handlers

GOOD = {"trainer_id": "t", "lineage": 1, "step": 1, "token": "x"}


async def detail_of(path: str, content: str | bytes) -> str:
    app = FastAPI()
    install_problem_handlers(app)

    @app.post("/batches")
    async def batches(body: BatchRequest) -> None: ...

    @app.post("/limit")
    async def limit(limit: Annotated[int, Query(le=10)]) -> None: ...

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as client:
        reply = await client.post(path, content=content, headers={"content-type": "application/json"})
    problem = reply.json()
    assert (reply.status_code, problem["status"], problem["type"]) == (422, 422, "urn:tba:problem:invalid-body")
    assert reply.headers["content-type"] == "application/problem+json"
    return problem["detail"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 0}, ["body.step", "greater than or equal to 1", "(value 0)"]),
        ({"step": "one"}, ["body.step", "(value 'one')"]),
        ({"wait_s": 61}, ["body.wait_s", "(value 61)"]),
        ({"surplus": [1]}, ["body.surplus", "(value [1])"]),
        ({"step": 0, "wait_s": -1}, ["body.step", "(value 0)", "body.wait_s", "(value -1)"]),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, ["body.a", "body.b", "body.c", "and 2 more"]),
        ({"token": "\ud800"}, ["body.token"]),
        ({"\ud800": 1}, ["unicode"]),
    ],
)
async def test_the_field_and_the_value_are_named(changes: dict[str, Any], said: list[str]) -> None:
    detail = await detail_of("/batches", json.dumps({**GOOD, **changes}))
    assert [part for part in said if part not in detail] == []


async def test_a_missing_field_is_named() -> None:
    assert await detail_of("/batches", "{}") == (
        "body.trainer_id: Field required; body.lineage: Field required; body.step: Field required; and 1 more"
    )


async def test_a_query_parameter_is_named() -> None:
    assert "query.limit: Input should be less than or equal to 10 (value '11')" in await detail_of(
        "/limit?limit=11", ""
    )


async def test_a_body_that_is_no_json_is_said_to_be_none() -> None:
    assert (await detail_of("/batches", '{"step": 1')).startswith("body.10: not JSON: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"step": "\xff"}', "'utf-8' codec can't decode byte 0xff"), (b"[" * 200_000, "recursion")],
)
async def test_a_body_that_cannot_be_decoded_says_why(content: bytes, said: str) -> None:
    detail = await detail_of("/batches", content)
    assert detail.startswith("body: cannot be read as JSON: ")
    assert said in detail


@pytest.mark.parametrize("body", [list(range(100_000)), {"x" * 100_000: {"y" * 100_000: 1}}, "z" * 100_000])
async def test_what_is_said_about_a_large_value_is_short(body: object) -> None:
    assert len(await detail_of("/batches", json.dumps(body))) < 1500


@pytest.mark.parametrize(
    ("method", "path", "status", "slug"),
    [("GET", "/nowhere", 404, "not-found"), ("DELETE", "/batches", 405, "method-not-allowed")],
)
async def test_what_is_not_there_is_a_problem_too(method: str, path: str, status: int, slug: str) -> None:
    app = FastAPI()
    install_problem_handlers(app)

    @app.post("/batches")
    async def batches() -> None: ...

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as client:
        reply = await client.request(method, path)
    assert (reply.status_code, reply.json()["type"]) == (status, f"urn:tba:problem:{slug}")
    assert path in reply.json()["detail"]
