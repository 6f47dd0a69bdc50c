"""Batches and the ledger."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tba.api import AckRequest, BatchRequest, LedgerReply
from tba.service import Authenticator, MsgpackResponse
from tba_buffer.buffer import Buffer
from tba_buffer.ledger import MAX_ENTRIES_PER_PAGE, read_ledger


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Draw, ack, read back."""
    api = APIRouter(prefix="/v1")
    trainer = [Depends(auth.require("trainer"))]

    @api.post("/batches", operation_id="draw_batch", response_class=MsgpackResponse, dependencies=trainer)
    async def draw_batch(body: BatchRequest) -> MsgpackResponse:
        """Draw the batch of one optimizer step (msgpack `tba.wire.decode_batch`); 429 names what is waited for."""
        drawn = await buffer.batches.draw(body)
        buffer.metrics.drawn(drawn.slots)
        return MsgpackResponse(drawn.body)

    @api.post("/batches/{batch_id}/ack", operation_id="ack", status_code=204, dependencies=trainer)
    async def ack(batch_id: str, body: AckRequest) -> None:
        """State that a step consumed the batch."""
        await buffer.batches.ack(batch_id, body)
        buffer.metrics.acked(body.policy_ages)

    @api.get("/ledger", operation_id="ledger", dependencies=[Depends(auth.require("viewer", "trainer"))])
    async def ledger(
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES_PER_PAGE)] = 1000,
    ) -> LedgerReply:
        """Acked batches in order."""
        return await read_ledger(buffer.context, buffer.lineages, after=after, limit=limit)

    return api
