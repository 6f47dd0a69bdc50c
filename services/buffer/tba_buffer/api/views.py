"""Endpoints that show a run: its counts and curves, where it stands, and which weight versions there are."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tba.api import Curves, Stats, WeightVersionList
from tba.fields import MAX_STEP
from tba.server import Authenticator
from tba_buffer.monitoring.curves import MAX_NAMES_CHARS, MAX_POINTS
from tba_buffer.service import Buffer


def progress_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints of the counts, the curves and the versions."""
    api = APIRouter(prefix="/v1")
    viewer = [Depends(auth.require("viewer"))]

    @api.get("/stats", operation_id="stats", dependencies=[Depends(auth.require("viewer", "trainer"))])
    async def stats() -> Stats:
        """Return the counts of the whole run."""
        return await buffer.stats.read()

    @api.get(
        "/curves",
        operation_id="curves",
        dependencies=[Depends(auth.require("viewer", "trainer"))],
    )
    async def curves(
        names: Annotated[str | None, Query(max_length=MAX_NAMES_CHARS)] = None,
        from_step: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        to_step: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        max_points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 500,
    ) -> Curves:
        """Return the metrics of the steps, thinned to `max_points`; `names` are those of metrics, with commas between
        them."""
        return await buffer.curves.read(names=names, from_step=from_step, to_step=to_step, max_points=max_points)

    @api.get("/versions", operation_id="list_versions", dependencies=viewer)
    async def list_versions() -> WeightVersionList:
        """Return the newest weight versions that the object store has."""
        return await buffer.weight_versions.newest()

    return api
