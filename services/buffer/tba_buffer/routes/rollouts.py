"""POST /v1/rollouts."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request

from tba.api import PushReply
from tba.service import Authenticator, raw_body
from tba.wire import decode_push
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """The endpoint that searchers push to."""
    api = APIRouter(prefix="/v1")

    @api.post("/rollouts", operation_id="push", dependencies=[Depends(auth.require("searcher"))])
    async def push(request: Request) -> PushReply:
        """Store rollouts (msgpack `tba.wire.encode_push`); answered only once they are durable."""
        payloads = decode_push(await raw_body(request), max_bytes=buffer.context.recipe.buffer.max_body_bytes)
        outcomes = await buffer.rollouts.push(payloads)
        buffer.metrics.pushed(outcomes)
        fields = await buffer.run.read()
        return PushReply(outcomes=outcomes, latest_version=fields.latest_version, run_state=fields.state)

    return api
