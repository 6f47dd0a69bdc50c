"""The FastAPI application of the buffer service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry

from tba.config import Recipe
from tba.errors import ConflictError, NotFoundError
from tba.server import Authenticator, create_app
from tba.tokens import TokensFile
from tba_buffer.api import rollouts, run, views
from tba_buffer.monitoring.request_times import RequestTimes
from tba_buffer.page.files import page_router
from tba_buffer.service import Buffer

RENAMED_ENDPOINTS = {("POST", "/v1/marks"): "/v1/versions"}
"""(method, path of an older release) -> the path that it has now."""


def build_app(recipe: Recipe, tokens: Mapping[str, str] | TokensFile | None) -> FastAPI:
    """Build the application. It first reads Redis when it starts, or earlier in `app.state.start`.

    Args:
        tokens: role -> bearer token, or None on loopback.

    Raises:
        ConfigError: settings that could never work together.
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
    app.add_middleware(RequestTimes, metrics=buffer.metrics.times)
    why = recipe.buffer.read_only
    guards = [] if why is None else [Depends(_write_refusal(why))]
    # a request tries the routes in this order: the most frequent endpoints come first
    for router in (
        rollouts.push_router,
        rollouts.batches_router,
        run.router,
        rollouts.prompts_router,
        rollouts.evaluations_router,
        rollouts.lineages_router,
        rollouts.views_router,
        rollouts.scores_router,
        run.settings_router,
        run.searchers_router,
        run.snapshots_router,
        views.progress_router,
    ):
        app.include_router(router(buffer, auth), dependencies=guards)
    app.include_router(page_router())
    for (method, path), new_path in RENAMED_ENDPOINTS.items():
        _add_renamed(app, method, path, new_path)
    return app


def _write_refusal(why: str) -> Callable[[Request], None]:
    """Return a dependency that refuses every request but reads."""

    def refuse(request: Request) -> None:
        if request.method not in ("GET", "HEAD"):
            raise ConflictError(f"this is a read-only view ({why}), so it takes no {request.method} {request.url.path}")

    return refuse


def _add_renamed(app: FastAPI, method: str, path: str, new_path: str) -> None:
    """Answer 404 at the old path, with a problem that names the new one: clients of an older release learn why."""

    async def renamed() -> None:
        raise NotFoundError(f"{method} {path} is now {method} {new_path}")

    app.add_api_route(path, renamed, methods=[method], include_in_schema=False)
