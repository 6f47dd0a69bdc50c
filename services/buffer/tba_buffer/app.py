"""The FastAPI application of the buffer service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tba.config import Recipe
from tba.service import Authenticator, create_app
from tba.tokens import TokensFile
from tba_buffer.buffer import Buffer
from tba_buffer.request_times import RequestTimes
from tba_buffer.routes import (
    batches,
    evals,
    events,
    lineages,
    prompts,
    rollout_views,
    rollouts,
    run,
    scores,
    searchers,
    settings,
    snapshots,
)


def build_app(recipe: Recipe, tokens: Mapping[str, str] | TokensFile | None) -> FastAPI:
    """The application; Redis is first read when it starts, or before that by `app.state.start`.

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
    app.state.start = buffer.start
    app.add_middleware(RequestTimes, metrics=buffer.metrics.times)
    # requests try the routes in this order: what is asked most comes first
    seldom = (rollout_views, scores, settings, searchers, snapshots, events)
    for routes in (rollouts, batches, run, prompts, evals, lineages, *seldom):
        app.include_router(routes.router(buffer, auth))
    return app
