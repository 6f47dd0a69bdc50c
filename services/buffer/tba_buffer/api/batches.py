"""Endpoints of the trainer: batches, samples, the ledger; lineages, published versions, checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from tba.api import (
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    LedgerReply,
    LineageReply,
    LineageRequest,
    Name,
    SampleRequest,
    VersionReply,
    VersionRequest,
)
from tba.api.run import SETTINGS_HEADER
from tba.server import Authenticator, MsgpackResponse, problems
from tba_buffer.sampling.ledger import MAX_ENTRIES_PER_PAGE
from tba_buffer.service import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints that draw and ack batches, and read samples and the ledger."""
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
        drawn = await buffer.sampling.batch_drawer.draw(body)
        return MsgpackResponse(drawn.body, headers={SETTINGS_HEADER: str(buffer.run.settings.revision)})

    @api.post(
        "/batches/{batch_id}/ack",
        operation_id="ack",
        status_code=204,
        dependencies=trainer,
        responses=problems(400, 409),
    )
    async def ack(batch_id: Name, body: AckRequest, response: Response) -> None:
        """State that a step consumed the batch."""
        await buffer.sampling.ledger.ack(batch_id, body)
        response.headers[SETTINGS_HEADER] = str(buffer.run.settings.revision)

    @api.post(
        "/samples",
        operation_id="sample",
        response_class=MsgpackResponse,
        dependencies=reader,
        responses=problems(429),
    )
    async def sample(body: SampleRequest) -> MsgpackResponse:
        """Draw stored rollouts by priority (msgpack, laid out as a push) and record nothing; headers `tba-seed` and
        `tba-log-position` reproduce the draw."""
        drawn = await buffer.sampling.sample_drawer.draw(body)
        headers = {"tba-seed": str(drawn.seed), "tba-log-position": str(drawn.log_position)}
        return MsgpackResponse(drawn.body, headers=headers)

    @api.get("/ledger", operation_id="ledger", dependencies=reader)
    async def ledger(
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES_PER_PAGE)] = 1000,
    ) -> LedgerReply:
        """Return acked batches and trainer starts in order."""
        return await buffer.sampling.ledger.read(after=after, limit=limit)

    return api


def lineages_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints that begin a lineage, announce a version, register a checkpoint."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(auth.require("trainer"))])

    @api.post("/lineages", operation_id="new_lineage", responses=problems(409))
    async def new_lineage(body: LineageRequest) -> LineageReply:
        """Begin a new lineage for a trainer that starts; every older token is refused from now on."""
        # a run that is to begin with a snapshot takes no trainer before everything is loaded
        await buffer.rollouts.snapshots.check_may_train()
        return await buffer.run.lineages.new(body)

    @api.post("/versions", operation_id="announce_version", responses=problems(409))
    async def announce_version(body: VersionRequest) -> VersionReply:
        """Announce a published version, so that searchers load it."""
        return VersionReply(log_position=await buffer.run.lineages.publish(body))

    @api.post("/checkpoints", operation_id="register_checkpoint", status_code=204, responses=problems(409))
    async def register_checkpoint(body: CheckpointRequest) -> None:
        """Make a complete checkpoint the one that a resume starts from."""
        await buffer.run.lineages.checkpoint(body)

    return api
