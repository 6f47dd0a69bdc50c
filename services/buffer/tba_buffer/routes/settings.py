"""Live settings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from tba.api import SettingsInfo, SettingsRequest
from tba.api.settings import SETTINGS_HEADER
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer
from tba_buffer.routes.who import operator_or_trainer


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Read and change."""
    api = APIRouter(prefix="/v1/run/settings")

    @api.get(
        "", operation_id="settings", dependencies=[Depends(auth.require("viewer", "trainer"))], responses=problems()
    )
    async def settings(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> SettingsInfo:
        """What holds now, and the changes after a revision."""
        return await buffer.settings.info(after=after)

    @api.patch(
        "",
        operation_id="change_settings",
        dependencies=[Depends(auth.require("operator", "trainer"))],
        responses=problems(409),
    )
    async def change_settings(body: SettingsRequest, request: Request, response: Response) -> SettingsInfo:
        """Change learning rate, beta, m, sampling temperature or the interval of evaluations while the run goes on."""
        role = operator_or_trainer(auth, request, token=body.token, what="changes settings")
        info = await buffer.settings.change(body, role)
        response.headers[SETTINGS_HEADER] = str(info.revision)
        return info

    return api
