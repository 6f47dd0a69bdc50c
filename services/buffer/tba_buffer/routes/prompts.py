"""Prompts and their leases."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tba.api import (
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    PromptUpload,
    PromptUploadReply,
)
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Upload, lease, renew, return."""
    api = APIRouter(prefix="/v1")
    searcher = [Depends(auth.require("searcher"))]

    @api.post(
        "/prompts",
        operation_id="upload_prompts",
        dependencies=[Depends(auth.require("operator"))],
        responses=problems(409),
    )
    async def upload_prompts(body: PromptUpload) -> PromptUploadReply:
        """Add prompts; the same id with other content refuses the whole upload."""
        return await buffer.catalog.upload(body.prompts)

    @api.post("/leases", operation_id="lease", dependencies=searcher)
    async def lease(body: LeaseRequest) -> LeaseReply:
        """Claim visits and evaluation units."""
        return await buffer.leases.lease(body)

    @api.post("/leases/renew", operation_id="renew_leases", dependencies=searcher)
    async def renew_leases(body: LeaseRenewal) -> LeaseRenewalReply:
        """Keep leases that take longer than their deadline."""
        return await buffer.leases.renew(body)

    @api.post("/leases/return", operation_id="return_leases", status_code=204, dependencies=searcher)
    async def return_leases(body: LeaseReturn) -> None:
        """Give unfinished leases back, and end those that cannot be sampled."""
        await buffer.leases.give_back(body)

    return api
