"""The HTTP surface of the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry

from tba.api import RewardInfo, RewardsReply, ScoreReply, ScoreRequest
from tba.config import Recipe
from tba.errors import LimitError, UnavailableError
from tba.service import Authenticator, create_app
from tba_reward.metrics import Metrics
from tba_reward.registry import load_registry
from tba_reward.scoring import Scorer

_DISCONNECT_POLL_S = 0.5


def build_app(recipe: Recipe, *, tokens: Mapping[str, str] | None) -> FastAPI:
    """The application.

    Raises:
        ConfigError: a plugin cannot be loaded.
    """
    section = recipe.reward
    rewards = load_registry(section.plugins)
    metrics_registry = CollectorRegistry()
    scorer = Scorer(
        rewards,
        Metrics(metrics_registry),
        num_workers=section.num_workers,
        item_timeout_s=section.item_timeout_s,
        max_pending=4 * section.max_items,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        check = asyncio.create_task(scorer.check())
        try:
            yield
        finally:
            check.cancel()
            await asyncio.to_thread(scorer.close)

    auth = Authenticator(tokens)
    app = create_app(
        title="reward",
        recipe=recipe,
        max_body_bytes=section.max_body_bytes,
        auth=auth,
        ready=scorer.ready,
        lifespan=lifespan,
        registry=metrics_registry,
    )

    @app.post("/v1/score", operation_id="score", dependencies=[Depends(auth.require("searcher"))])
    async def score(body: ScoreRequest, request: Request) -> ScoreReply:
        """Score completions: per item a reward or an error."""
        if len(body.items) > section.max_items:
            raise LimitError(
                f"{len(body.items)} items, the limit is {section.max_items}; send smaller requests, or raise "
                "reward.max_items"
            )
        task = asyncio.create_task(scorer.score(body.items))
        while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                task.cancel()
                raise UnavailableError("the client hung up before its completions were scored")
        return ScoreReply(results=task.result())

    @app.get("/v1/rewards", operation_id="rewards", dependencies=[Depends(auth.require("viewer", "searcher"))])
    async def list_rewards() -> RewardsReply:
        """The tasks that are scored here."""
        return RewardsReply(
            rewards=[
                RewardInfo(task=r.task, version=r.version, fast=r.fast, health=scorer.health[r.task])
                for r in sorted(rewards, key=lambda reward: reward.task)
            ]
        )

    return app
