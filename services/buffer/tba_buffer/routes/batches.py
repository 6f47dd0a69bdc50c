"""Batches, samples and the ledger."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from tba.api import AckRequest, BatchRequest, LedgerReply, Name, SampleRequest
from tba.api.settings import SETTINGS_HEADER
from tba.service import Authenticator, MsgpackResponse, problems
from tba_buffer.buffer import Buffer
from tba_buffer.ledger import MAX_ENTRIES_PER_PAGE, read_ledger


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Draw, ack, read back."""
    api = APIRouter(prefix="/v1")
    trainer = [Depends(auth.require("trainer"))]
    reader = [Depends(auth.require("viewer", "trainer"))]

    @api.post(
        "/batches",
        operation_id="draw_batch",
        response_class=MsgpackResponse,
        dependencies=trainer,
        responses=problems(409, 429),
    )
    async def draw_batch(body: BatchRequest) -> MsgpackResponse:
        """Draw the batch of one optimizer step (msgpack `tba.wire.decode_batch`); 429 names what is waited for."""
        drawn = await buffer.draws.draw(body)
        return MsgpackResponse(drawn.body, headers={SETTINGS_HEADER: str(buffer.settings.revision)})

    @api.post(
        "/batches/{batch_id}/ack",
        operation_id="ack",
        status_code=204,
        dependencies=trainer,
        responses=problems(400, 409),
    )
    async def ack(batch_id: Name, body: AckRequest, response: Response) -> None:
        """State that a step consumed the batch."""
        await buffer.acks.ack(batch_id, body)
        response.headers[SETTINGS_HEADER] = str(buffer.settings.revision)

    @api.post(
        "/samples",
        operation_id="sample",
        response_class=MsgpackResponse,
        dependencies=reader,
        responses=problems(429),
    )
    async def sample(body: SampleRequest) -> MsgpackResponse:
        """Draw stored rollouts by priority (msgpack, laid out as a push) and record nothing; headers `tba-seed` and
        `tba-log-position` reproduce it."""
        drawn = await buffer.samples.draw(body)
        headers = {"tba-seed": str(drawn.seed), "tba-log-position": str(drawn.log_position)}
        return MsgpackResponse(drawn.body, headers=headers)

    @api.get("/ledger", operation_id="ledger", dependencies=reader)
    async def ledger(
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES_PER_PAGE)] = 1000,
    ) -> LedgerReply:
        """Acked batches and trainer starts in order."""
        return await read_ledger(buffer.context, buffer.lineages, after=after, limit=limit)

    return api
