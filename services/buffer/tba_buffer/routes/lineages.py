"""What a trainer announces: lineages, marks, checkpoints."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tba.api import CheckpointRequest, LineageReply, LineageRequest, MarkReply, MarkRequest
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """New lineage, mark, checkpoint."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(auth.require("trainer"))])

    @api.post("/lineages", operation_id="new_lineage", responses=problems(409))
    async def new_lineage(body: LineageRequest) -> LineageReply:
        """A trainer starts; every older token is refused from now on."""
        await buffer.snapshots.check_may_train()
        return await buffer.lineages.new(body)

    @api.post("/marks", operation_id="mark", responses=problems(409))
    async def mark(body: MarkRequest) -> MarkReply:
        """Announce a published version and set the sync mark."""
        return MarkReply(log_position=await buffer.lineages.mark(body))

    @api.post("/checkpoints", operation_id="register_checkpoint", status_code=204, responses=problems(409))
    async def register_checkpoint(body: CheckpointRequest) -> None:
        """Make a complete checkpoint the one that a resume starts from."""
        await buffer.lineages.checkpoint(body)

    return api
