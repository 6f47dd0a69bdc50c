"""POST /v1/rollouts."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from tba.api import PushReply
from tba.service import MSGPACK_BODY, Authenticator, problems, raw_body
from tba.wire import decode_push
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """The endpoint that searchers push to."""
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
        with buffer.admission.body(request):
            result = await buffer.rollouts.push(decode_push(await raw_body(request), max_bytes=max_bytes))
        body = {
            "outcomes": result.outcomes,
            "latest_version": result.latest_version,
            "run_state": result.run_state,
        }
        return Response(msgspec.json.encode(body), media_type="application/json")

    return api
