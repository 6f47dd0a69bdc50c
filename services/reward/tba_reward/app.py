"""The HTTP endpoints of the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry

from tba.api import RewardInfo, RewardsReply, ScoreReply
from tba.api.scores import ScorerInfo
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.errors import UnavailableError
from tba.server import Authenticator, create_app, problems, raw_body
from tba.tokens import TokensFile
from tba_reward.metrics import Metrics
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.request_parsing import read_items, request_schema
from tba_reward.scorers import Tools
from tba_reward.service import RewardService, build_tasks
from tba_reward.tasks.cache import ScoreCache
from tba_reward.tasks.composite import CompositeReward

_DISCONNECT_POLL_S = 0.5


def build_app(recipe: Recipe, *, tokens: Mapping[str, str] | TokensFile | None) -> FastAPI:
    """Return the application.

    Raises:
        ConfigError: a scorer of the recipe cannot be built.
    """
    section = recipe.reward
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    pool = WorkerPool(
        num_workers=section.num_workers,
        max_memory_bytes=section.worker_memory_bytes,
        start_timeout_s=section.worker_start_s,
        on_loss=metrics.record_worker_loss,
    )
    tools = Tools(pool=pool, models=ModelPool(), item_timeout_s=section.item_timeout_s)
    service = RewardService(
        build_tasks(section, tools, ScoreCache(section.cache_items), metrics),
        metrics,
        max_pending_items=section.max_pending_items,
        request_timeout_s=section.request_deadline_s,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()
            await pool.close()

    auth = Authenticator(tokens)
    app = create_app(
        title="reward",
        recipe=recipe,
        max_body_bytes=section.max_body_bytes,
        auth=auth,
        ready=service.ready,
        note=service.away,
        lifespan=lifespan,
        registry=registry,
    )

    @app.post(
        "/v1/score",
        operation_id="score",
        dependencies=[Depends(auth.require("searcher"))],
        openapi_extra=request_schema(),
        responses=problems(429),
    )
    async def score(body: Annotated[bytes, Depends(raw_body)], request: Request) -> ScoreReply:
        """Score completions: per item a reward or an error. An item that cannot be read gets an error of its own."""
        most = {"max_items": section.max_items, "max_text_chars": section.max_text_chars}
        items = await in_thread(lambda: read_items(body, **most))  # 16 MiB take a second on a busy machine
        task = asyncio.create_task(service.score(items))
        # nobody waits for the results of a client that hung up: its items must not hold the workers
        try:
            while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S))[0]:
                if await request.is_disconnected():
                    raise UnavailableError("the client hung up before its completions were scored")
        finally:
            task.cancel()
        return ScoreReply(results=task.result())

    @app.get("/v1/rewards", operation_id="rewards", dependencies=[Depends(auth.require("viewer", "searcher"))])
    async def list_rewards() -> RewardsReply:
        """List the tasks that are scored here."""
        return RewardsReply(rewards=[_info(task) for task in service.tasks.values()])

    return app


def _info(task: CompositeReward) -> RewardInfo:
    scorers = [
        ScorerInfo(
            name=each.name,
            kind=each.spec.kind,
            weight=each.spec.factor,
            gate=each.spec.gate,
            version=each.version,
            health=each.health,
        )
        for each in task.components
    ]
    return RewardInfo(task=task.task, version=task.version, health=task.health, scorers=scorers)
