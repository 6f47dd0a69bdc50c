"""Scoring what is stored again."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tba.api import RescoreInfo, RescoreRequest
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Start, look, cancel."""
    api = APIRouter(prefix="/v1/rescore")

    @api.post(
        "", operation_id="start_rescore", dependencies=[Depends(auth.require("operator"))], responses=problems(400, 409)
    )
    async def start_rescore(body: RescoreRequest) -> RescoreInfo:
        """Score what is stored again; the same request answers the job that runs for it."""
        return await buffer.rescoring.start(body)

    @api.get("", operation_id="rescore", dependencies=[Depends(auth.require("viewer"))], responses=problems(404))
    async def rescore() -> RescoreInfo:
        """The job that runs, or the last one."""
        return await buffer.rescoring.info()

    @api.post(
        "/cancel",
        operation_id="cancel_rescore",
        dependencies=[Depends(auth.require("operator"))],
        responses=problems(404),
    )
    async def cancel_rescore() -> RescoreInfo:
        """End the job; what is scored again already stays so."""
        return await buffer.rescoring.cancel()

    return api
