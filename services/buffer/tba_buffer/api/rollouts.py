"""Endpoints for rollouts: push them, read them, score stored ones again."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from tba.api import PushReply, RescoreInfo, RescoreRequest, RolloutDetail, RolloutOrder, RolloutPage
from tba.api.rollouts import RewardStatus
from tba.fields import VersionText
from tba.server import MSGPACK_BODY, Authenticator, problems, raw_body
from tba.wire import decode_push
from tba_buffer.rollouts.queries import MAX_CURSOR_CHARS, PageRequest
from tba_buffer.service import Buffer

MAX_PER_PAGE = 100
MAX_TEXT_CHARS_PER_ROLLOUT = 10_000


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoint that searchers push to."""
    api = APIRouter(prefix="/v1")
    max_bytes = buffer.context.recipe.buffer.max_body_bytes

    @api.post(
        "/rollouts",
        operation_id="push",
        response_model=PushReply,
        dependencies=[Depends(auth.require("searcher"))],
        openapi_extra=MSGPACK_BODY,
        responses=problems(429),
    )
    async def push(request: Request) -> Response:
        """Store rollouts (msgpack `tba.wire.encode_push`); answered only once they are durable."""
        # before the body is read: what is not admitted must take no memory
        with buffer.rollouts.admission.admit(request):
            result = await buffer.rollouts.writer.push(decode_push(await raw_body(request), max_bytes=max_bytes))
        body = {
            "outcomes": result.outcomes,
            "latest_version": result.latest_version,
            "run_state": result.run_state,
        }
        # msgspec instead of FastAPI's encoder: a push has an outcome for each of its rollouts
        return Response(msgspec.json.encode(body), media_type="application/json")

    return api


def views_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints that read rollouts."""
    api = APIRouter(prefix="/v1/rollouts", dependencies=[Depends(auth.require("viewer"))])

    @api.get("", operation_id="list_rollouts", responses=problems(400, 404))
    async def list_rollouts(
        order: RolloutOrder = "newest",
        prompt_id: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
        version: VersionText | None = None,
        status: RewardStatus | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PER_PAGE)] = 20,
        cursor: Annotated[str | None, Query(max_length=MAX_CURSOR_CHARS)] = None,
        text_chars: Annotated[int, Query(ge=0, le=MAX_TEXT_CHARS_PER_ROLLOUT)] = 1000,
    ) -> RolloutPage:
        """Return stored rollouts: the best, worst, newest or oldest, of a prompt, a version, a reward status."""
        request = PageRequest(
            order=order,
            prompt_id=prompt_id,
            version=version,
            status=status,
            limit=limit,
            cursor=cursor,
            text_chars=text_chars,
        )
        return await buffer.rollouts.reader.page(request)

    @api.get("/{rollout_id}", operation_id="get_rollout")
    async def get_rollout(rollout_id: Annotated[str, Path(pattern="^[0-9a-f]{32}$")]) -> RolloutDetail:
        """Return everything that is stored of one rollout."""
        return await buffer.rollouts.reader.get(rollout_id)

    return api


def scores_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for re-scoring jobs."""
    api = APIRouter(prefix="/v1/rescore")

    @api.post(
        "", operation_id="start_rescore", dependencies=[Depends(auth.require("operator"))], responses=problems(400, 409)
    )
    async def start_rescore(body: RescoreRequest) -> RescoreInfo:
        """Score stored rollouts again; the same request returns the job that runs for it."""
        return await buffer.scoring.rescore_jobs.start(body)

    @api.get("", operation_id="rescore", dependencies=[Depends(auth.require("viewer"))], responses=problems(404))
    async def rescore() -> RescoreInfo:
        """Return the job that runs, or the last one."""
        return await buffer.scoring.rescore_jobs.info()

    @api.post(
        "/cancel",
        operation_id="cancel_rescore",
        dependencies=[Depends(auth.require("operator"))],
        responses=problems(404),
    )
    async def cancel_rescore() -> RescoreInfo:
        """End the job; rollouts that it has scored keep their new scores."""
        return await buffer.scoring.rescore_jobs.cancel()

    return api
