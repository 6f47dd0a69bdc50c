"""How many searchers the run has."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tba.api import ScaleRequest, ScalingInfo
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Read and change."""
    api = APIRouter(prefix="/v1/run/searchers")

    @api.get(
        "", operation_id="scaling", dependencies=[Depends(auth.require("viewer", "trainer"))], responses=problems()
    )
    async def scaling(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> ScalingInfo:
        """How many searchers are wanted and alive, and the changes after a revision."""
        return await buffer.scaling.info(after=after)

    @api.patch("", operation_id="scale", dependencies=[Depends(auth.require("operator"))], responses=problems(409))
    async def scale(body: ScaleRequest) -> ScalingInfo:
        """Start or stop searchers while the run goes on: so many, or (null) as many as the recipe or the chart says."""
        return await buffer.scaling.change(body)

    return api
