"""The HTTP endpoints of the reward service. A bad item of a request gets its own error; the other items are scored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from tba.api import RewardInfo, RewardsReply, ScoreItem, ScoreReply, ScoreResult
from tba.api.scores import MAX_SCORE_BODY_BYTES, MAX_SCORE_ITEMS, ScorerInfo
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.errors import LimitError, MalformedError, UnavailableError
from tba.fields import MAX_DIGITS, first_problem
from tba.server import Authenticator, create_app, raw_body
from tba.tokens import TokensFile
from tba_reward.composite_reward import ScoreCache
from tba_reward.metrics import Metrics
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Failure
from tba_reward.scorers import Tools
from tba_reward.service import RewardService, build_tasks, failed

_DISCONNECT_POLL_S = 0.5
MAX_ID_CHARS = 200
MAX_TEXT_CHARS = 1_000_000
"""Longest prompt or response that is scored: longer than any model's context, too short to occupy a worker for long."""
MAX_PENDING_ITEMS = 4096
"""Most completions in work at once: four requests of the largest size. Further requests get status 429."""
WORKER_MEMORY_BYTES, WORKER_START_S = 4 * 1024**3, 60.0
"""Address-space limit of a worker process, far above what a rule needs; deadline for a worker to load one rule."""
CACHE_ITEMS = 65_536
"""Most scores in the cache. Each takes the memory of a 16-byte digest and a number."""


def build_app(recipe: Recipe, *, tokens: Mapping[str, str] | TokensFile | None) -> FastAPI:
    """Return the FastAPI application of the reward service, with all tasks of the recipe."""
    section = recipe.reward
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    pool = WorkerPool(
        num_workers=section.num_workers,
        max_memory_bytes=WORKER_MEMORY_BYTES,
        start_timeout_s=WORKER_START_S,
        on_loss=lambda cause: metrics.worker_losses.labels(cause).inc(),
    )
    tools = Tools(pool=pool, models=ModelPool())
    service = RewardService(
        build_tasks(section, tools, ScoreCache(CACHE_ITEMS, metrics), metrics),
        metrics,
        max_pending=MAX_PENDING_ITEMS,
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
        max_body_bytes=MAX_SCORE_BODY_BYTES,
        auth=auth,
        ready=service.ready,
        note=service.away,
        lifespan=lifespan,
        registry=registry,
    )

    item = {"anyOf": [ScoreItem.model_json_schema(), {"description": "anything else gets the error `malformed`"}]}
    schema = {
        "title": "ScoreRequest",
        "type": "object",
        "properties": {"items": {"type": "array", "minItems": 1, "items": item}},
        "required": ["items"],
        "additionalProperties": False,
    }

    @app.post(
        "/v1/score",
        operation_id="score",
        dependencies=[Depends(auth.require("searcher"))],
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )
    async def score(body: Annotated[bytes, Depends(raw_body)], request: Request) -> ScoreReply:
        """Score completions: per item a reward or an error. An item that cannot be read gets an error of its own."""
        items = await in_thread(lambda: read_items(body))  # 16 MiB take a second on a busy machine
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
        rewards = list[RewardInfo]()
        for task in service.tasks.values():
            scorers = [
                ScorerInfo(
                    name=each.name,
                    kind=each.spec.kind,
                    weight=each.weight,
                    gate=each.spec.gate,
                    version=each.version,
                    health=each.health,
                )
                for each in task.components
            ]
            rewards.append(RewardInfo(task=task.task, version=task.version, health=task.health, scorers=scorers))
        return RewardsReply(rewards=rewards)

    return app


def read_items(
    body: bytes, *, max_items: int = MAX_SCORE_ITEMS, max_text_chars: int = MAX_TEXT_CHARS
) -> list[ScoreItem | ScoreResult]:
    """Return the items of the JSON body `{"items": [...]}` in order, with an error in place of each unusable item.

    Raises:
        MalformedError: the body is not such an object, or has no items.
        LimitError: too many items.
    """
    try:
        # Python parses no number of over 4,300 digits: what is left of one is still too long, and fails its item alone
        document = json.loads(body, parse_int=lambda text: int(text[: MAX_DIGITS + 2]))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("items"), list) or len(document) > 1:
        raise MalformedError('the body must be an object {"items": [...]} and nothing else')
    items = document["items"]
    if not items:
        raise MalformedError("items is empty; send at least one")
    if len(items) > max_items:
        raise LimitError(f"{len(items)} items, the limit is {max_items}; send smaller requests")
    return [_read_item(item, at, max_text_chars) for at, item in enumerate(items)]


def _read_item(item: Any, at: int, max_text_chars: int) -> ScoreItem | ScoreResult:
    try:
        read = ScoreItem.model_validate(item)
    except ValidationError as error:
        found = item.get("item_id") if isinstance(item, dict) else None
        # an answer cannot hold a lone surrogate; the client matches by position, so the id is for people
        item_id = found[:MAX_ID_CHARS] if isinstance(found, str) and found and found.isprintable() else f"item {at}"
        return failed(item_id, Failure("malformed", first_problem(error, whole="item")))
    for name, text in (("prompt", read.prompt), ("response", read.response)):
        try:
            text.encode()
        except UnicodeEncodeError:
            return failed(read.item_id, Failure("malformed", f"the {name} holds a lone surrogate, which is no text"))
        if len(text) > max_text_chars:
            detail = f"the {name} has {len(text)} characters, the limit is {max_text_chars}"
            return failed(read.item_id, Failure("too_long", detail))
    return read
