"""The FastAPI application that every service starts from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tba
from tba.config import Recipe
from tba.errors import BadRequestError, LimitError, UnavailableError
from tba.server.auth import AccessGate, Authenticator, AuthThrottle
from tba.server.openapi import PROBLEMS, install_openapi
from tba.server.problems import error_response, install_problem_handlers, problem_response
from tba.tls import with_bare_urls

MAX_DISCARDED_BYTES = 64 * 2**20
BODY_IDLE_S = 10.0
"""Longest wait for the next bytes of a body, after which it is refused."""
MIN_BODY_BYTES_PER_S = 64 * 1024
"""Slowest accepted rate: all waits for a body may take BODY_IDLE_S + received bytes / this, in seconds."""
Ready = Callable[[], Awaitable[str | None]]


class MsgpackResponse(Response):
    """A response whose body is encoded msgpack."""

    media_type = "application/msgpack"


class BodyLimit:
    """ASGI middleware that refuses bodies over `max_body_bytes` with 413, and slow ones with 408.

    The size is checked by Content-Length, and again while the body arrives. A body is slow if it stalls for
    BODY_IDLE_S, or arrives at less than MIN_BODY_BYTES_PER_S.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    def _error(self, num_bytes: int) -> LimitError:
        return LimitError(
            f"the body has {num_bytes} bytes or more, the limit is {self.max_body_bytes}; send smaller requests"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # an honest client is refused before its bytes are read; a chunked body is counted below
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            response = error_response(self._error(int(declared)))
            # uvicorn discards the rest of a smaller body, so the client sees the answer and keeps its connection
            if int(declared) > MAX_DISCARDED_BYTES:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        num_bytes, waited_s = 0, 0.0
        is_whole = has_started = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, waited_s, is_whole
            if is_whole:  # the application waits for the disconnect of its client, without a deadline
                return await receive()
            # slow but steady bytes earn more time, so a large body over a thin line passes, and a trickle does not
            left_s = BODY_IDLE_S + num_bytes / MIN_BODY_BYTES_PER_S - waited_s
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(min(BODY_IDLE_S, left_s)):  # wait "request-body"
                    message = await receive()
            except TimeoutError:
                if has_started:  # the answer is on its way, 408 comes too late
                    return {"type": "http.disconnect"}
                waited_s += time.monotonic() - started_s
                # FastAPI lets only HTTPException out of its body parsing. The connection closes, because what a
                # service holds for a request that it reads (Admission of the buffer) must not be held for ever.
                said = (
                    f"the body did not arrive: {num_bytes} bytes of it in {waited_s:.1f} s of waiting; it may pause "
                    f"for {BODY_IDLE_S:g} s, and must arrive at {MIN_BODY_BYTES_PER_S} bytes per second or more; "
                    "send it again"
                )
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, said, {"connection": "close"}) from None
            waited_s += time.monotonic() - started_s
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self.max_body_bytes:
                raise HTTPException(LimitError.status, str(self._error(num_bytes)), {"connection": "close"})
            return message

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        await self.app(scope, receive_limited, send_noted)


async def raw_body(request: Request) -> bytes:
    """Return the whole body of a request, whose size BodyLimit has bounded."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise BadRequestError("the client hung up before its body was complete") from None


def create_app(
    *,
    title: str,
    recipe: Recipe,
    max_body_bytes: int,
    auth: Authenticator,
    ready: Ready,
    registry: CollectorRegistry,
    note: Callable[[], str | None] = lambda: None,
    lifespan: Any = None,
    refresh_metrics: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """Return an application with problem documents, tokens, body limit, health and metrics; a service adds its routes.

    Args:
        ready: returns None if the service is ready, else the reason in a sentence; or raises a TbaError with its slug.
        note: returns a note for GET /readyz of a service that is ready, or None.
        registry: the metrics that GET /metrics shows.
        refresh_metrics: updates the metrics before GET /metrics; if it raises UnavailableError, the old values stay.
    """
    app = FastAPI(
        title=title,
        version=tba.__version__,
        lifespan=lifespan,
        responses=PROBLEMS,
        openapi_url=None,  # openapi.py has it
        docs_url=None,  # FastAPI's page needs a CDN
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to the Host that the client sent
    )
    # middleware runs in reverse order: the limit of the body is outside, and the token is checked before it is read
    hosts = {urlsplit(url).hostname or "" for url in (recipe.buffer_url, recipe.reward_url)}
    app.add_middleware(AccessGate, auth=auth, throttle=AuthThrottle(registry), names=hosts)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    app.state.auth = auth
    install_problem_handlers(app)
    install_openapi(app)
    build = Gauge("tba_build_info", "Version of tba; always 1", ["version", "component"], registry=registry)
    build.labels(version=tba.__version__, component=title).set(1)

    @app.get("/livez", operation_id="livez")
    async def livez() -> dict[str, str]:
        """Answer 200 while the process runs."""
        return {"status": "ok"}

    @app.get("/readyz", operation_id="readyz", response_model=dict[str, str])
    async def readyz() -> Response | dict[str, str]:
        """Answer 200 if the service can do its work, else 503."""
        reason = await ready()
        if reason is not None:
            return problem_response(status=503, slug="not-ready", detail=reason)
        said = note()
        return {"status": "ok", **({} if said is None else {"note": with_bare_urls(said)})}

    @app.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics as Prometheus text."""
        # with Redis away the other numbers still say what happens
        if refresh_metrics is not None:
            with suppress(UnavailableError):
                await refresh_metrics()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", operation_id="version")
    async def version() -> dict[str, str]:
        """Return the names of service and run, and the release of tba."""
        return {"service": title, "version": tba.__version__, "run": recipe.run.name}

    return app
