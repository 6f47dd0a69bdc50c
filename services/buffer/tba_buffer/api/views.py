"""Endpoints that only people read: where the run stands, and which weight versions there are."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tba.api import RunSummary, WeightVersionList
from tba.server import Authenticator
from tba_buffer.monitoring.summary import CURVE_NAMES, NUM_POINTS, summarise
from tba_buffer.service import Buffer


def summary_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints of the summary and the versions."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(auth.require("viewer"))])

    @api.get("/summary", operation_id="summary")
    async def summary() -> RunSummary:
        """Say in sentences what the run does, how it learns, what waits for what, and what to try."""
        curves = await buffer.curves.read(names=",".join(CURVE_NAMES), max_points=NUM_POINTS)
        return summarise(await buffer.run_info(), await buffer.stats.read(), curves)

    @api.get("/versions", operation_id="list_versions")
    async def list_versions() -> WeightVersionList:
        """Return the newest weight versions that the object store has."""
        return await buffer.weight_versions.newest()

    return api
