"""The FastAPI application of the buffer service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry

from tba.config import Recipe
from tba.errors import ConflictError
from tba.server import Authenticator, create_app
from tba.tokens import TokensFile
from tba_buffer.api import rollouts, run
from tba_buffer.monitoring.metrics import RequestTimes
from tba_buffer.page.files import page_router
from tba_buffer.service import Buffer


def build_app(recipe: Recipe, tokens: Mapping[str, str] | TokensFile | None) -> FastAPI:
    """Build the application. Its startup, or an earlier await of `app.state.start`, reads the run from Redis.

    Args:
        tokens: the bearer token of each role, or the file with them. None: no token is checked (loopback only).

    Raises:
        ConfigError: settings contradict each other.
    """
    registry = CollectorRegistry()
    buffer, auth = Buffer(recipe, registry), Authenticator(tokens)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await buffer.start()
        yield
        await buffer.stop()

    app = create_app(
        title="buffer",
        recipe=recipe,
        max_body_bytes=recipe.buffer.max_body_bytes,
        auth=auth,
        ready=buffer.ready,
        registry=registry,
        lifespan=lifespan,
        refresh_metrics=buffer.metrics.refresh,
    )
    # awaited before the port listens: nobody meets a service that still reads Redis
    app.state.start = buffer.start
    app.add_middleware(RequestTimes, registry=registry)
    why = recipe.buffer.read_only

    def refuse_writes(request: Request) -> None:
        if request.method not in ("GET", "HEAD"):
            raise ConflictError(f"this is a read-only view ({why}), so it takes no {request.method} {request.url.path}")

    guards = [] if why is None else [Depends(refuse_writes)]
    # a request tries the routes in this order: the most frequent endpoints come first
    for router in (
        rollouts.training_router,
        run.router,
        rollouts.prompts_router,
        rollouts.views_router,
        run.settings_router,
        run.views_router,
    ):
        app.include_router(router(buffer, auth), dependencies=guards)
    app.include_router(page_router())
    return app
