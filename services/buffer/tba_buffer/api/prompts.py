"""Endpoints for prompts, their leases, and evaluations."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tba.api import (
    EvalInfo,
    EvalRequest,
    EvalResults,
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    Name,
    PromptUpload,
    PromptUploadReply,
)
from tba.server import Authenticator, problems
from tba_buffer.service import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for prompts and leases."""
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
        return await buffer.prompts.catalog.upload(body.prompts)

    @api.post("/leases", operation_id="lease", dependencies=searcher)
    async def lease(body: LeaseRequest) -> LeaseReply:
        """Lease visits and evaluation units."""
        return await buffer.prompts.leases.lease(body)

    @api.post("/leases/renew", operation_id="renew_leases", dependencies=searcher)
    async def renew_leases(body: LeaseRenewal) -> LeaseRenewalReply:
        """Give leases that take longer a new deadline."""
        return await buffer.prompts.leases.renew(body)

    @api.post("/leases/return", operation_id="return_leases", status_code=204, dependencies=searcher)
    async def return_leases(body: LeaseReturn) -> None:
        """Return unfinished leases, and end those that cannot be sampled."""
        await buffer.prompts.leases.give_back(body)

    return api


def evaluations_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for evaluations."""
    api = APIRouter(prefix="/v1/evals")

    @api.post("", operation_id="request_eval", dependencies=[Depends(auth.require("trainer"))], responses=problems(409))
    async def request_eval(body: EvalRequest) -> EvalInfo:
        """Evaluate a published version on held-out prompts."""
        return await buffer.prompts.evaluations.request(body)

    @api.get("/{eval_id}", operation_id="get_eval", dependencies=[Depends(auth.require("viewer", "trainer"))])
    async def get_eval(eval_id: Name) -> EvalInfo:
        """Return one evaluation."""
        return await buffer.prompts.evaluations.get(eval_id)

    @api.post(
        "/{eval_id}/results",
        operation_id="eval_results",
        status_code=204,
        dependencies=[Depends(auth.require("searcher"))],
        responses=problems(400, 409),
    )
    async def eval_results(eval_id: Name, body: EvalResults) -> None:
        """Report the rewards of evaluation leases."""
        await buffer.prompts.evaluations.results(eval_id, body)

    return api
