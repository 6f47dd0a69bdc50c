"""Endpoints for the run: state, commands, heartbeats, live settings, searchers, snapshots, counts and curves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response

from tba.api import (
    ACKNOWLEDGED_HEADER,
    CheckpointList,
    CommandRequest,
    Curves,
    LoadRequest,
    OriginInfo,
    RollbackRequest,
    RunChanges,
    RunInfo,
    ScaleRequest,
    ScalingInfo,
    SettingsInfo,
    SettingsRequest,
    SnapshotInfo,
    SnapshotRequest,
    Stats,
    WeightVersionList,
)
from tba.api.run import SETTINGS_HEADER, CommandName, Role
from tba.errors import ForbiddenError
from tba.fields import MAX_STEP
from tba.server import MSGPACK_BODY, Authenticator, raw_body
from tba.wire import decode_heartbeat
from tba_buffer.monitoring.curves import MAX_NAMES_CHARS, MAX_POINTS
from tba_buffer.service import Buffer

SnapshotName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
_KINDS = {"searcher": ("searcher",), "trainer": ("trainer", "launcher")}
"""The kinds of heartbeat that each role may send. Autoscalers start searchers when a trainer waits, so no searcher may
report a trainer's waits."""
COMMAND_ROLES: dict[CommandName, tuple[str, ...]] = {
    "pause": ("operator", "trainer"),
    "done": ("trainer",),
    "fail": ("trainer",),
    "resume": ("operator",),
    "stop": ("operator",),
    "accept-loss": ("operator",),
    "rollback": ("operator",),
}


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for heartbeats, the state of the run, commands and checkpoints."""
    api = APIRouter(prefix="/v1")

    @api.post(
        "/heartbeats",
        operation_id="heartbeat",
        status_code=204,
        dependencies=auth.only("searcher", "trainer", "operator"),
        openapi_extra=MSGPACK_BODY,
    )
    async def heartbeat(
        request: Request, response: Response, heard: Annotated[str, Header(alias=ACKNOWLEDGED_HEADER)] = ""
    ) -> None:
        """Record a heartbeat (msgpack `tba.wire.encode_heartbeat`). A trainer sends back the last header
        `tba-acknowledged` that it received; a restarted buffer then detects changes that Redis has lost."""
        beat = decode_heartbeat(await raw_body(request))
        role = auth.role_of(request.headers.get("authorization", ""))
        # operators, and callers where no tokens are checked, may send every kind
        if role in _KINDS and beat.kind not in _KINDS[role]:
            raise ForbiddenError(f"role {role!r} sends heartbeats of kind {_KINDS[role][0]!r}, not {beat.kind!r}")
        await buffer.components.beat(beat)
        # trainers only, since a false claim would stop the run; `beat` has refused those of another run
        if heard and beat.kind == "trainer" and await buffer.context.losses.check_claim(heard):
            await buffer.context.durability.check()
        # the trainer keeps it and sends it with its next heartbeat, perhaps to the next start of the buffer
        if (acknowledged := buffer.context.losses.claim) is not None:
            response.headers[ACKNOWLEDGED_HEADER] = acknowledged

    @api.get("/run", operation_id="run", dependencies=auth.only("viewer", "searcher", "trainer"))
    async def run(request: Request, summary: bool = False) -> RunInfo:
        """Return the state of the run, its components, waits and evaluations. `summary`, for viewers only, adds
        what the numbers say of the run, in sentences."""
        if summary:
            auth.check(request.headers.get("authorization", ""), ("viewer",))
        return await buffer.run_info(with_summary=summary)

    @api.get("/run/changes", operation_id="run_changes", dependencies=auth.only("viewer", "trainer"))
    async def run_changes(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> RunChanges:
        """Return who paused, resumed, stopped, ended or rolled back the run or accepted a loss, when and why."""
        return await buffer.control.changes(after=after)

    @api.post("/run", operation_id="command", dependencies=auth.only("operator", "trainer"))
    async def command(body: CommandRequest, request: Request) -> RunInfo:
        """Change the state of the run. A trainer may send pause, done and fail; an operator may send pause, resume,
        stop, rollback and accept-loss."""
        auth.check(request.headers.get("authorization", ""), COMMAND_ROLES[body.command])
        match body.command:
            case "accept-loss":
                await buffer.recovery.accept("operator", body.reason)
            case "rollback":
                fields = body.model_dump(include={"step", "reason", "request_id"}, exclude_none=True)
                await buffer.rollbacks.request(RollbackRequest(**fields))
            case "resume" | "stop":
                await buffer.control.command(body.command, body, "operator")
            case name:
                role = requester_role(auth, request, token=body.token, what=f"says {name!r}")
                await buffer.control.command(name, body, role)
        return await buffer.run_info()

    @api.get("/checkpoints", operation_id="checkpoints", dependencies=auth.only("viewer"))
    async def checkpoints() -> CheckpointList:
        """Return the checkpoints that a rollback can return to, newest first."""
        return CheckpointList(versions=[str(version) for version in await buffer.rollbacks.checkpoints()])

    return api


def settings_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for live settings and the number of searchers."""
    api = APIRouter(prefix="/v1")

    @api.get("/run/settings", operation_id="settings", dependencies=auth.only("viewer", "trainer"))
    async def settings(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> SettingsInfo:
        """Return the current live settings, and their changes after the revision `after`."""
        return await buffer.settings.info(after=after)

    @api.patch("/run/settings", operation_id="change_settings", dependencies=auth.only("operator", "trainer"))
    async def change_settings(body: SettingsRequest, request: Request, response: Response) -> SettingsInfo:
        """Change learning rate, beta, m, sampling temperature or the interval of evaluations of a running run."""
        role = requester_role(auth, request, token=body.token, what="changes settings")
        info = await buffer.settings.change(body, role)
        response.headers[SETTINGS_HEADER] = str(info.revision)
        return info

    @api.get("/run/searchers", operation_id="scaling", dependencies=auth.only("viewer", "trainer"))
    async def scaling(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> ScalingInfo:
        """Return how many searchers are desired and alive, and the changes of `desired` after the revision `after`."""
        return await buffer.scaling.info(after=after)

    @api.patch("/run/searchers", operation_id="scale", dependencies=auth.only("operator"))
    async def scale(body: ScaleRequest) -> ScalingInfo:
        """Set the number of searchers while the run continues; null restores the number of the recipe or the chart."""
        return await buffer.scaling.change(body)

    return api


def views_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for snapshots, counts, curves and versions."""
    api = APIRouter(prefix="/v1")
    operator, viewer = auth.only("operator"), auth.only("viewer")

    @api.post("/snapshots", operation_id="save_snapshot", status_code=202, dependencies=operator)
    async def save_snapshot(body: SnapshotRequest) -> SnapshotInfo:
        """Begin to save the buffer in the background; GET /v1/snapshots/{name} returns the progress."""
        return await buffer.snapshots.save(body.name)

    @api.post("/snapshots/load", operation_id="load_snapshot", status_code=202, dependencies=operator)
    async def load_snapshot(body: LoadRequest) -> OriginInfo:
        """Begin to load a snapshot into this new run; `origin` of GET /v1/run has the progress."""
        return await buffer.snapshots.load(body)

    @api.get("/snapshots/{name}", operation_id="get_snapshot", dependencies=viewer)
    async def get_snapshot(name: SnapshotName) -> SnapshotInfo:
        """Return one snapshot."""
        return await buffer.snapshots.info(name)

    @api.get("/stats", operation_id="stats", dependencies=auth.only("viewer", "trainer"))
    async def stats() -> Stats:
        """Return the counts of the whole run."""
        return await buffer.stats.read()

    @api.get("/curves", operation_id="curves", dependencies=auth.only("viewer", "trainer"))
    async def curves(
        names: Annotated[str | None, Query(max_length=MAX_NAMES_CHARS)] = None,
        from_step: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        to_step: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
        max_points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 500,
    ) -> Curves:
        """Return metrics per step, thinned to `max_points`; `names` are metric names, separated by commas."""
        return await buffer.curves.read(names=names, from_step=from_step, to_step=to_step, max_points=max_points)

    @api.get("/versions", operation_id="list_versions", dependencies=viewer)
    async def list_versions() -> WeightVersionList:
        """Return the newest weight versions that the object store has."""
        return await buffer.weight_versions.newest()

    return api


def requester_role(auth: Authenticator, request: Request, *, token: str | None, what: str) -> Role:
    """Return whether a request to change the run comes from an operator or a trainer.

    Args:
        token: the fencing token of the request, if any. The Lua script of the change checks that it is active.
        what: names the trainer's action in the error ("changes settings").

    Raises:
        ForbiddenError: a trainer sent no fencing token; another trainer may have replaced it.
    """
    role = auth.role_of(request.headers.get("authorization", ""))
    if role == "trainer" and token is None:
        raise ForbiddenError(f"the role 'trainer' {what} with its fencing token only; send `token`")
    # where bearer tokens are not checked, only a trainer sends a fencing token
    return "trainer" if role == "trainer" or (role is None and token is not None) else "operator"
