"""What all services have in common: health, problems, access, and the socket that they listen on."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, Query, Request, routing
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tba.api import BatchRequest
from tba.health import readiness_problem
from tba.server import Authenticator, create_app, openapi
from tba.server.auth import AuthThrottle
from tba.server.problems import install_problem_handlers
from tba.server.serve import bind
from tests.support.answering import answering
from tests.support.buffer import make_recipe


async def test_a_refused_address_has_a_line_a_minute() -> None:
    times_s = [5.0 * number for number in range(20)]
    clock = iter([*times_s, 100.0])
    throttle = AuthThrottle(CollectorRegistry(), clock=lambda: next(clock))
    with capture_logs() as lines:
        for _ in times_s:
            await throttle.delay("10.0.0.1")
        await throttle.delay("10.0.0.2")
    logged = [(line["client"], line["requests"]) for line in lines]
    assert logged == [("10.0.0.1", 1), ("10.0.0.1", 13), ("10.0.0.2", 1)]


# ---- The health check of the images, against a real server on loopback ----------------------------------------------


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tba.health", *arguments], capture_output=True, text=True)


def test_the_exit_code_and_one_sentence_say_how_a_service_is(tmp_path):
    with answering([(200, b"{}")]) as (url, asked):
        port = int(url.rpartition(":")[2])
        assert readiness_problem(port) is None
        assert check(str(port)).returncode == 0
    assert set(asked) == {"/readyz"}
    assert f"nothing answers on port {port}" in str(readiness_problem(port))
    with answering([(503, {"detail": "Redis does not answer"})]) as (url, _):
        port = int(url.rpartition(":")[2])
        answer = check(str(port))
        assert (answer.returncode, answer.stderr) == (1, f"error: port {port} answers 503: Redis does not answer\n")
    answer = check()
    assert (answer.returncode, "give either a port or --config" in answer.stderr) == (2, True)
    answer = check("--config", str(tmp_path / "missing.toml"))
    assert (answer.returncode, answer.stderr.startswith("error: ")) == (1, True)


# ---- Problem documents of requests that do not fit ------------------------------------------------------------------


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


async def test_a_missing_field_a_query_parameter_and_a_body_that_is_no_json_are_named() -> None:
    assert await detail_of("/batches", "{}") == (
        "body.trainer_id: Field required; body.lineage: Field required; body.step: Field required; and 1 more"
    )
    assert await detail_of("/limit?limit=11", "") == "limit: Input should be less than or equal to 10 (value '11')"
    assert (await detail_of("/batches", '{"step": 1')).startswith("body.10: not JSON: ")


@pytest.mark.parametrize(
    ("content", "said"), [(b'{"step": "\xff"}', "'utf-8' codec can't decode byte 0xff"), (b"[" * 200_000, "recursion")]
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


# ---- Any Authorization header that is not a known token of the right role is refused with a problem document --------


TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}


def status_of(header: bytes | None) -> tuple[int, str]:
    app, auth = FastAPI(), Authenticator(TOKENS)
    install_problem_handlers(app)

    @app.get("/", dependencies=[Depends(auth.require("viewer"))])
    async def look() -> dict[str, str]:
        return {"status": "ok"}

    async def ask() -> httpx2.Response:
        headers = [] if header is None else [(b"authorization", header)]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app") as client:
            return await client.get("/", headers=headers)

    reply = asyncio.run(ask())
    return reply.status_code, reply.headers["content-type"]


@settings(deadline=None, max_examples=60)
@given(
    header=st.binary(max_size=60)
    | st.binary(max_size=40).map(lambda token: b"Bearer " + token)
    | st.sampled_from([*TOKENS.values()]).map(lambda token: f"Basic {token}".encode())
)
def test_what_is_no_known_token_is_refused(header: bytes) -> None:
    assert status_of(header) == (401, "application/problem+json")


# ---- The OpenAPI document -------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    app = FastAPI(responses=openapi.PROBLEMS)

    @app.get("/v1/things/{name}", dependencies=[Depends(Authenticator(TOKENS).require("trainer"))])
    def thing(name: str) -> str:
        return name

    openapi.install_openapi(app)
    return app.openapi()


def test_the_document_is_the_same_with_the_fastapi_that_vllm_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = document()
    operation = expected["paths"]["/v1/things/{name}"]["get"]
    assert (list(operation["responses"]), operation["security"]) == (["200", "default"], [{"bearer": ["trainer"]}])
    monkeypatch.setattr(openapi, "routing", SimpleNamespace(APIRoute=routing.APIRoute))
    assert document() == expected


# ---- What a web page of another site makes a browser send -----------------------------------------------------------


OWN = ["127.0.0.1:8700", "localhost", "LocalHost:1234", "run.localhost:80", "[::1]:8700", "[::1]", "buffer.home"]
OWN += ["buffer.home:8700", "10.1.2.3:8700"]  # the last one is a pod's
FOREIGN = ["evil.example:8700", "localhost.evil.example", "127.0.0.1.evil.example:8700", "buffer", "evil:8700:"]


def gated(tokens: dict[str, str] | None) -> FastAPI:
    async def ready() -> None: ...

    recipe, auth = make_recipe(buffer={"url": "https://buffer.home:8700"}), Authenticator(tokens)
    common: dict[str, Any] = {"max_body_bytes": 100, "auth": auth, "ready": ready, "registry": CollectorRegistry()}
    app = create_app(title="test", recipe=recipe, **common)

    @app.post("/v1/body")
    async def body(request: Request) -> int:
        return len(await request.body())

    return app


async def asked(app: FastAPI, method: str, headers: dict[str, str], content: bytes = b"") -> int:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:8700") as client:
        path = "/version" if method == "GET" else "/v1/body"
        reply = await client.request(method, path, content=content, headers=headers)
    assert reply.is_success or reply.json()["status"] == reply.status_code
    return reply.status_code


@pytest.mark.parametrize(("host", "status"), [*((host, 200) for host in OWN), *((host, 403) for host in FOREIGN)])
async def test_without_tokens_a_service_has_no_names_but_its_own(host: str, status: int) -> None:
    assert await asked(gated(None), "GET", {"host": host}) == status
    assert await asked(gated(TOKENS), "GET", {"host": host}) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content-type": "application/msgpack"}, 200),
        ({"content-type": "application/json; charset=utf-8", "origin": "http://127.0.0.1:8700"}, 200),
        ({"content-type": "application/json", "origin": "http://127.0.0.1:9000"}, 403),
        ({"content-type": "application/json", "origin": "https://evil.example"}, 403),
        ({"content-type": "application/json", "origin": "null"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain;charset=UTF-8"}, 400),
        ({"content-type": "application/x-www-form-urlencoded"}, 400),
        ({"content-type": "Multipart/Form-Data; boundary=x"}, 400),
    ],
)
async def test_without_tokens_a_page_of_another_site_changes_nothing(headers: dict[str, str], status: int) -> None:
    assert await asked(gated(None), "POST", headers, b"1234") == status
    # with tokens a page knows none, and proxies may change Host and Origin
    token = {"authorization": f"Bearer {TOKENS['trainer']}"}
    assert await asked(gated(TOKENS), "POST", headers | token, b"1234") == 200
    assert await asked(gated(TOKENS), "POST", headers, b"1234") == 401


async def test_the_openapi_document_is_rendered_once() -> None:
    app = gated(None)
    document, rendered = app.openapi(), []
    app.openapi = lambda: rendered.append(1) or document
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
        replies = [await client.get("/openapi.json") for _ in range(3)]
    assert [reply.json() for reply in replies] == [document] * 3
    assert replies[0].headers["content-type"] == "application/json"
    assert rendered == [1]


# ---- The listening socket of every service ---------------------------------------------------------------------------


def test_answers_do_not_wait_for_acknowledgements_on_any_loop() -> None:
    """asyncio sets TCP_NODELAY only where the socket says that it is TCP; uvloop always does."""

    async def accepted_has_no_delay() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        server = await asyncio.start_server(serve, sock=(listening := bind("127.0.0.1", 0)))
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            return await found

    assert asyncio.run(accepted_has_no_delay())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with bind("::", 0) as listening:
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listening.getsockname()[1])).close()


def test_all_addresses_of_a_machine_without_ipv6_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bind("::", 0) as listening:
        assert listening.family == socket.AF_INET


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:87"), ("::", "http://[::]:87"), ("h", "http://h:87")])
def test_an_ipv6_address_is_in_brackets_in_a_url(host: str, url: str) -> None:
    recipe = make_recipe(**{key: {"host": host, "port": 87} for key in ("buffer", "reward")})
    assert (recipe.buffer_url, recipe.reward_url) == (url, url)
