"""Snapshots: save the buffer, begin a run with one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from tba.api import LoadRequest, OriginInfo, SnapshotInfo, SnapshotList, SnapshotRequest
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer

SnapshotName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Save, list, read, load."""
    api = APIRouter(prefix="/v1/snapshots")
    operator, viewer = [Depends(auth.require("operator"))], [Depends(auth.require("viewer"))]

    @api.post("", operation_id="save_snapshot", status_code=202, dependencies=operator, responses=problems(409))
    async def save_snapshot(body: SnapshotRequest) -> SnapshotInfo:
        """Begin to save what is stored; GET /v1/snapshots/{name} says how far it is."""
        return await buffer.snapshots.save(body.name)

    @api.post(
        "/load", operation_id="load_snapshot", status_code=202, dependencies=operator, responses=problems(404, 409)
    )
    async def load_snapshot(body: LoadRequest) -> OriginInfo:
        """Begin this run with a snapshot; `origin` of GET /v1/run says how far it is."""
        return await buffer.snapshots.load(body)

    @api.get("", operation_id="snapshots", dependencies=viewer)
    async def snapshots() -> SnapshotList:
        """The complete snapshots of this run."""
        return await buffer.snapshots.names()

    @api.get("/{name}", operation_id="get_snapshot", dependencies=viewer)
    async def get_snapshot(name: SnapshotName) -> SnapshotInfo:
        """One snapshot."""
        return await buffer.snapshots.info(name)

    return api
