"""Evaluations."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tba.api import EvalInfo, EvalRequest, EvalResults, Name
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Request, read, report."""
    api = APIRouter(prefix="/v1/evals")

    @api.post("", operation_id="request_eval", dependencies=[Depends(auth.require("trainer"))], responses=problems(409))
    async def request_eval(body: EvalRequest) -> EvalInfo:
        """Evaluate a published version on held-out prompts."""
        return await buffer.evals.request(body)

    @api.get("/{eval_id}", operation_id="get_eval", dependencies=[Depends(auth.require("viewer", "trainer"))])
    async def get_eval(eval_id: Name) -> EvalInfo:
        """One evaluation."""
        return await buffer.evals.get(eval_id)

    @api.post(
        "/{eval_id}/results",
        operation_id="eval_results",
        status_code=204,
        dependencies=[Depends(auth.require("searcher"))],
        responses=problems(400, 409),
    )
    async def eval_results(eval_id: Name, body: EvalResults) -> None:
        """Report the rewards of evaluation leases."""
        await buffer.evals.results(eval_id, body)

    return api
