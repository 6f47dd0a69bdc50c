"""The HTTP endpoints of the reward service, and the body of a score request: a bad item fails alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from tba.api import RewardInfo, RewardsReply, ScoreError, ScoreItem, ScoreReply, ScoreResult
from tba.api.scores import MAX_SCORE_BODY_BYTES, MAX_SCORE_ITEMS, ScoreReason, ScorerInfo
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.errors import LimitError, MalformedError, UnavailableError
from tba.fields import MAX_DIGITS
from tba.server import Authenticator, create_app, raw_body
from tba.tokens import TokensFile
from tba_reward.composite_reward import CompositeReward, ScoreCache
from tba_reward.metrics import Metrics
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorers import Tools
from tba_reward.service import RewardService, build_tasks

_DISCONNECT_POLL_S = 0.5
MAX_ID_CHARS = 200
MAX_TEXT_CHARS = 1_000_000
"""Longest prompt or response that is scored: above every context, and below what would hold a worker for long."""
MAX_PENDING_ITEMS = 4096
"""Most completions in work at once: four of the largest requests. More are refused with 429, to come back later."""
WORKER_MEMORY_BYTES, WORKER_START_S = 4 * 1024**3, 60.0
"""Address space of a worker process, far above what a rule needs; deadline of its imports before its first item."""
CACHE_ITEMS = 65_536
"""Most scores kept to be given again for the same content. A score takes a digest and a number."""
MAX_DEPTH = 100
"""Depth of the lists and objects in an item's data. `json` follows them by recursion, which ends beyond 900."""
_ITEM_DEPTH = 3
"""Depth of an item in the body: an object in a list in an object."""
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{},]', re.DOTALL)
"""A string, to its end or the end of the text, or one character of structure."""
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
"""A surrogate or the escape of one; escaped pairs, which are valid, match too."""


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
        max_memory_bytes=WORKER_MEMORY_BYTES,
        start_timeout_s=WORKER_START_S,
        on_loss=metrics.record_worker_loss,
    )
    tools = Tools(pool=pool, models=ModelPool())
    service = RewardService(
        build_tasks(section, tools, ScoreCache(CACHE_ITEMS), metrics),
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

    @app.post(
        "/v1/score",
        operation_id="score",
        dependencies=[Depends(auth.require("searcher"))],
        openapi_extra=request_schema(),
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
        return RewardsReply(rewards=[_info(task) for task in service.tasks.values()])

    return app


def _info(task: CompositeReward) -> RewardInfo:
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
    return RewardInfo(task=task.task, version=task.version, health=task.health, scorers=scorers)


def read_items(
    body: bytes, *, max_items: int = MAX_SCORE_ITEMS, max_text_chars: int = MAX_TEXT_CHARS
) -> list[ScoreItem | ScoreResult]:
    """Return the items of `{"items": [...]}` in order; one that cannot be scored is replaced by its error.

    Raises:
        MalformedError: the body is not such an object, or has no items.
        LimitError: too many items.
    """
    # bytes that are no text become surrogates, which fail their item alone
    text = body.decode("utf-8", "surrogateescape")
    deep: frozenset[int] = frozenset()
    try:
        try:
            document = json.loads(text, parse_int=_integer)
        except RecursionError:
            # one item is nested too deep: without its depths the others can be read
            shallow, deep = _without_depths(text)
            document = json.loads(shallow, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("items"), list):
        raise MalformedError('the body must be an object {"items": [...]}')
    unknown = sorted(set(document) - {"items"})
    if unknown:
        raise MalformedError(f"the body has the unknown key {unknown[0]!r:.100}; remove it")
    items = document["items"]
    if not items:
        raise MalformedError("items is empty; send at least one")
    if len(items) > max_items:
        raise LimitError(f"{len(items)} items, the limit is {max_items}; send smaller requests")
    # one search over the whole body: nearly every body has none, and no item is then looked at twice
    is_suspect = _SURROGATE.search(text) is not None
    return [
        _too_deep(item, at) if at in deep else _read_item(item, at, max_text_chars, is_suspect=is_suspect)
        for at, item in enumerate(items)
    ]


def request_schema() -> dict[str, Any]:
    """Return the `openapi_extra` of the endpoint that reads such a body."""
    item = {"anyOf": [ScoreItem.model_json_schema(), {"description": "anything else gets the error `malformed`"}]}
    schema = {
        "title": "ScoreRequest",
        "type": "object",
        "properties": {"items": {"type": "array", "minItems": 1, "items": item}},
        "required": ["items"],
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _read_item(item: Any, at: int, max_text_chars: int, *, is_suspect: bool) -> ScoreItem | ScoreResult:
    if isinstance(item, dict) and _is_deep(item):
        return _too_deep(item, at)
    try:
        read = ScoreItem.model_validate(item)
        # encoding every item again would take time: only a text with a surrogate can fail here
        if is_suspect:
            json.dumps([read.prompt, read.response, read.finish_reason, read.data], ensure_ascii=False).encode()
    except ValidationError as error:
        return _error_result(_item_id(item, at), "malformed", _describe(error))
    except UnicodeEncodeError:
        return _error_result(_item_id(item, at), "malformed", "it has text that is not valid Unicode")
    for name, text in (("prompt", read.prompt), ("response", read.response)):
        if len(text) > max_text_chars:
            detail = f"the {name} has {len(text)} characters, the limit is {max_text_chars}"
            return _error_result(read.item_id, "too_long", detail)
    return read


def _too_deep(item: Any, at: int) -> ScoreResult:
    detail = f"the lists and objects in it are nested more than {MAX_DEPTH} deep"
    return _error_result(_item_id(item, at), "malformed", detail)


def _is_deep(item: dict[str, Any]) -> bool:
    level = [value for value in item.values() if isinstance(value, dict | list)]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return bool(level)


def _without_depths(text: str) -> tuple[str, frozenset[int]]:
    """Return the body with `null` for values that are nested too deep, and the numbers of the items that had such."""
    depth, at, start, end = 0, 0, 0, 0
    kept, deep = [], set[int]()
    for token in _JSON_TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
                if depth == _ITEM_DEPTH + MAX_DEPTH + 1:
                    start = token.start()
            case "]" | "}":
                if depth == _ITEM_DEPTH + MAX_DEPTH + 1:
                    kept += [text[end:start], "null"]
                    end = token.end()
                    deep.add(at)
                depth -= 1
            case "," if depth == _ITEM_DEPTH - 1:
                at += 1
    return "".join([*kept, text[end:]]), frozenset(deep)


def _integer(text: str) -> int | float:
    """Return an integer; one with more than MAX_DIGITS digits is infinite, as a float of that size is."""
    # Python refuses to parse more than 4,300 digits, and one number must not fail the other items
    return int(text) if len(text) <= MAX_DIGITS else float(text)


def _error_result(item_id: str, reason: ScoreReason, detail: str) -> ScoreResult:
    return ScoreResult(item_id=item_id, error=ScoreError(reason=reason, detail=detail))


def _item_id(item: Any, at: int) -> str:
    """Return the item's own id where an answer can hold it, else one of its place."""
    found = item.get("item_id") if isinstance(item, dict) else None
    # an answer cannot hold a lone surrogate
    if not isinstance(found, str) or not found or _SURROGATE.search(found):
        return f"item {at}"
    # the client matches results by position; the id of a bad item is for people
    return found[:MAX_ID_CHARS]


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return (f"{where}: {first['msg']}" if where else first["msg"]).encode("utf-8", "replace").decode()
