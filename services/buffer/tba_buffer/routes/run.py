"""The run: its state, its components, its counts."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from tba.api import ACKNOWLEDGED_HEADER, AcceptLoss, RunChanges, RunCommand, RunInfo, Stats
from tba.errors import BusyError, ConflictError, WireError
from tba.service import MSGPACK_BODY, Authenticator, problems, raw_body
from tba.service.auth import ForbiddenError
from tba.wire import decode_heartbeat
from tba_buffer.buffer import Buffer
from tba_buffer.routes.who import operator_or_trainer

_KINDS = {"searcher": ("searcher",), "trainer": ("trainer", "launcher")}
"""Whose signs of life a role may send; what a trainer waited decides how many searchers an autoscaler starts."""
_SENTENCES = {
    "done": "The trainer with the living token says that the run is done.",
    "fail": "The trainer with the living token says that the run has failed.",
    "pause": "Pause the run: an operator, or the trainer with the living token.",
}


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Heartbeats, state, commands, stats."""
    api = APIRouter(prefix="/v1")

    _add_heartbeat(api, buffer, auth)

    @api.get("/run", operation_id="run", dependencies=[Depends(auth.require("viewer", "searcher", "trainer"))])
    async def run() -> RunInfo:
        """State of the run, components, waits, evaluations."""
        return await buffer.run_info()

    @api.get(
        "/run/changes",
        operation_id="run_changes",
        dependencies=[Depends(auth.require("viewer", "trainer"))],
        responses=problems(),
    )
    async def run_changes(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> RunChanges:
        """Who paused, resumed, stopped or ended the run, had versions tried again or accepted a loss, when and why."""
        return await buffer.run.changes(after=after)

    @api.post(
        "/run/accept-loss",
        operation_id="accept_loss",
        dependencies=[Depends(auth.require("operator"))],
        responses=problems(),
    )
    async def accept_loss(body: AcceptLoss) -> RunInfo:
        """Go on without what Redis has lost of what was acknowledged; nothing when nothing is lost."""
        await buffer.accept_loss("operator", body.reason)
        return await buffer.run_info()

    _add_command(api, "done", ["trainer"], buffer, auth)
    _add_command(api, "fail", ["trainer"], buffer, auth)
    _add_command(api, "pause", ["operator", "trainer"], buffer, auth)

    @api.post(
        "/run/retry-versions",
        operation_id="retry_versions",
        dependencies=[Depends(auth.require("operator"))],
        responses=problems(),
    )
    async def retry_versions(body: RunCommand) -> RunInfo:
        """Searchers try the weight versions that they have refused again, at once."""
        await buffer.run.retry_versions(body, "operator")
        return await buffer.run_info()

    @api.post(
        "/run/{command}",
        operation_id="command",
        dependencies=[Depends(auth.require("operator"))],
        responses=problems(409),
    )
    async def command(command: Literal["resume", "stop"], body: RunCommand) -> RunInfo:
        """Resume or stop the run."""
        await buffer.run.command(command, body, "operator")
        return await buffer.run_info()

    @api.get("/stats", operation_id="stats", dependencies=[Depends(auth.require("viewer", "trainer"))])
    async def stats() -> Stats:
        """Counts of the whole run."""
        return await buffer.stats()

    return api


def _add_heartbeat(api: APIRouter, buffer: Buffer, auth: Authenticator) -> None:
    @api.post(
        "/heartbeats",
        operation_id="heartbeat",
        status_code=204,
        dependencies=[Depends(auth.require("searcher", "trainer", "operator"))],
        openapi_extra=MSGPACK_BODY,
        responses=problems(409, 429),
    )
    async def heartbeat(
        request: Request, response: Response, heard: Annotated[str, Header(alias=ACKNOWLEDGED_HEADER)] = ""
    ) -> None:
        """A sign of life (msgpack `tba.wire.encode_heartbeat`). A trainer sends the header `tba-acknowledged` that it
        was answered with last, so that a buffer that was started again finds out what Redis has lost meanwhile."""
        body = await raw_body(request)
        try:
            beat = decode_heartbeat(body)
            role = auth.role_of(request.headers.get("authorization", ""))
            if role in _KINDS and beat.kind not in _KINDS[role]:
                raise ForbiddenError(f"role {role!r} sends heartbeats of kind {_KINDS[role][0]!r}, not {beat.kind!r}")
            await buffer.components.beat(beat)
            # no searcher: a lie would stop the run; and nobody of another run, whose numbers are others
            if heard and beat.kind == "trainer":
                await buffer.hear(heard)
        except (WireError, ForbiddenError, ConflictError, BusyError) as error:
            await buffer.components.count_refused(error)
            raise
        if (acknowledged := buffer.context.losses.heard) is not None:
            response.headers[ACKNOWLEDGED_HEADER] = acknowledged


def _add_command(
    api: APIRouter, name: Literal["done", "fail", "pause"], roles: list[str], buffer: Buffer, auth: Authenticator
) -> None:
    async def change(body: RunCommand, request: Request) -> RunInfo:
        role = operator_or_trainer(auth, request, token=body.token, what=f"says {name!r}")
        await buffer.run.command(name, body, role)
        return await buffer.run_info()

    # before /run/{command}, which would refuse the name
    api.add_api_route(
        f"/run/{name}",
        change,
        methods=["POST"],
        operation_id=name,
        description=_SENTENCES[name],
        dependencies=[Depends(auth.require(*roles))],
        responses=problems(409),
    )
