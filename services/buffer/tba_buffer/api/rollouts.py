"""Endpoints for the life cycle of a rollout: prompts, leases, pushes, batches, published versions.

Beside them are the endpoints for evaluations, for reading stored rollouts, and for scoring them again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from tba.api import (
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    EvalInfo,
    EvalReply,
    EvalRequest,
    EvalResults,
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    LedgerReply,
    LineageReply,
    LineageRequest,
    Name,
    PromptDetail,
    PromptPage,
    PromptUpload,
    PromptUploadReply,
    PushReply,
    RescoreInfo,
    RescoreRequest,
    RolloutDetail,
    RolloutPage,
    VersionReply,
    VersionRequest,
)
from tba.api.run import SETTINGS_HEADER
from tba.server import MSGPACK_BODY, Authenticator, MsgpackResponse, raw_body
from tba.wire import decode_push
from tba_buffer.api.run import requester_role
from tba_buffer.rollouts.parquet import ExportRequest, ExportResponse
from tba_buffer.rollouts.prompt_queries import PromptsRequest
from tba_buffer.rollouts.queries import PageRequest
from tba_buffer.sampling.ledger import MAX_ENTRIES_PER_PAGE
from tba_buffer.service import Buffer

PARQUET = {str(ExportResponse.media_type): {"schema": {"type": "string", "format": "binary"}}}


def training_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints that searchers push to and that trainers work with."""
    api = APIRouter(prefix="/v1")
    max_bytes = buffer.context.recipe.buffer.max_body_bytes

    @api.post(
        "/rollouts",
        operation_id="push",
        response_model=PushReply,
        dependencies=auth.only("searcher"),
        openapi_extra=MSGPACK_BODY,
    )
    async def push(request: Request) -> Response:
        """Store rollouts (msgpack `tba.wire.encode_push`); answered only once they are durable."""
        # before the body is read: what is not admitted must take no memory
        with buffer.admission.admit(request):
            outcomes, run = await buffer.writer.push(decode_push(await raw_body(request), max_bytes=max_bytes))
        body = {"outcomes": outcomes, "latest_version": run.sampling_version, "run_state": run.state}
        # msgspec instead of FastAPI's encoder: a push has an outcome for each of its rollouts
        return Response(msgspec.json.encode(body), media_type="application/json")

    trainer = auth.only("trainer")
    reader = auth.only("viewer", "trainer")

    @api.post("/batches", operation_id="draw_batch", response_class=MsgpackResponse, dependencies=trainer)
    async def draw_batch(body: BatchRequest) -> MsgpackResponse:
        """Draw the batch of one optimizer step (msgpack `tba.wire.decode_batch`); 429 names what the draw waits for."""
        drawn = await buffer.drawer.draw(body)
        # with every batch and ack: a trainer asks for the live settings when their revision is another one
        return MsgpackResponse(drawn.body, headers={SETTINGS_HEADER: str(buffer.settings.revision)})

    @api.post("/batches/{batch_id}/ack", operation_id="ack", status_code=204, dependencies=trainer)
    async def ack(batch_id: Name, body: AckRequest, response: Response) -> None:
        """Record in the ledger that an optimizer step consumed the batch."""
        await buffer.ledger.ack(batch_id, body)
        response.headers[SETTINGS_HEADER] = str(buffer.settings.revision)

    @api.get("/ledger", operation_id="ledger", dependencies=reader)
    async def ledger(
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES_PER_PAGE)] = 1000,
    ) -> LedgerReply:
        """Return acked batches and trainer starts in order."""
        return await buffer.ledger.read(after=after, limit=limit)

    @api.post("/lineages", operation_id="new_lineage", dependencies=trainer)
    async def new_lineage(body: LineageRequest) -> LineageReply:
        """Begin a new lineage for a trainer that starts; every older token is refused from now on."""
        # a run that is to begin with a snapshot takes no trainer before everything is loaded
        await buffer.snapshots.check_may_train()
        return await buffer.lineages.new(body)

    @api.post("/versions", operation_id="announce_version", dependencies=trainer)
    async def announce_version(body: VersionRequest) -> VersionReply:
        """Announce a published version, so that searchers load it."""
        # the position is the same for a repeat, so a trainer may send it again
        return VersionReply(log_position=await buffer.lineages.publish(body))

    @api.post("/checkpoints", operation_id="register_checkpoint", status_code=204, dependencies=trainer)
    async def register_checkpoint(body: CheckpointRequest) -> None:
        """Register a complete checkpoint; a resumed trainer starts from the last registered one."""
        await buffer.lineages.checkpoint(body)

    return api


def prompts_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints for prompts, leases and evaluations."""
    api = APIRouter(prefix="/v1")
    searcher, viewer = auth.only("searcher"), auth.only("viewer")

    @api.post("/prompts", operation_id="upload_prompts", dependencies=auth.only("operator"))
    async def upload_prompts(body: PromptUpload) -> PromptUploadReply:
        """Add prompts; the same id with other content refuses the whole upload."""
        return await buffer.catalog.upload(body.prompts)

    @api.get("/prompts", operation_id="list_prompts", dependencies=viewer)
    async def list_prompts(request: Annotated[PromptsRequest, Query()]) -> PromptPage:
        """Return matching prompts with the rewards of their stored rollouts. `contains` is searched in id and text,
        ignoring case. `after` is the number of prompts to skip in the order asked for."""
        return await buffer.prompt_reader.page(request)

    # a path, since the id of a prompt may hold slashes
    @api.get("/prompts/{prompt_id:path}", operation_id="get_prompt", dependencies=viewer)
    async def get_prompt(prompt_id: Annotated[str, Path(min_length=1, max_length=256)]) -> PromptDetail:
        """Return one prompt with its whole text, and its stored rollouts by policy version."""
        return await buffer.prompt_reader.get(prompt_id)

    @api.post("/leases", operation_id="lease", dependencies=searcher)
    async def lease(body: LeaseRequest, request: Request) -> LeaseReply:
        """Lease visits and evaluation units, waiting up to `wait_s`; an empty reply says when to ask again."""
        return await buffer.leases.lease(body, request.is_disconnected)

    @api.post("/leases/renew", operation_id="renew_leases", dependencies=searcher)
    async def renew_leases(body: LeaseRenewal) -> LeaseRenewalReply:
        """Extend the deadline of leases that the searcher still works on."""
        return await buffer.leases.renew(body)

    @api.post("/leases/return", operation_id="return_leases", status_code=204, dependencies=searcher)
    async def return_leases(body: LeaseReturn) -> None:
        """Return unfinished leases to be leased again, and end visits that cannot be sampled."""
        await buffer.leases.give_back(body)

    @api.post("/evals", operation_id="request_eval", dependencies=auth.only("trainer", "operator"))
    async def request_eval(body: EvalRequest, request: Request) -> EvalReply:
        """Have searchers evaluate a published version on held-out prompts; an existing evaluation is returned as is."""
        requester_role(auth, request, token=body.token, what="asks for an evaluation")
        return await buffer.evaluations.request(body)

    @api.get("/evals/{eval_id}", operation_id="get_eval", dependencies=auth.only("viewer", "trainer"))
    async def get_eval(eval_id: Name) -> EvalInfo:
        """Return one evaluation."""
        return await buffer.evaluations.get(eval_id)

    @api.post(
        "/evals/{eval_id}/results", operation_id="eval_results", status_code=204, dependencies=auth.only("searcher")
    )
    async def eval_results(eval_id: Name, body: EvalResults) -> None:
        """Report the rewards of evaluation leases."""
        await buffer.evaluations.results(eval_id, body)

    return api


def views_router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Build the endpoints that read rollouts and score them again."""
    api = APIRouter(prefix="/v1")
    viewer = auth.only("viewer")

    @api.get("/rollouts", operation_id="list_rollouts", dependencies=viewer)
    async def list_rollouts(request: Annotated[PageRequest, Query()]) -> RolloutPage:
        """Return stored rollouts: the best, worst, newest or oldest of those that match."""
        return await buffer.reader.page(request)

    @api.get(
        "/rollouts.parquet",
        operation_id="export_rollouts",
        dependencies=viewer,
        response_class=Response,
        responses={200: {"description": "the file", "content": PARQUET}},
    )
    async def export_rollouts(wanted: Annotated[ExportRequest, Query()]) -> Response:
        """Stream all stored rollouts that match as one Parquet file, oldest first; `tokens=false` leaves out the
        columns of tokens and log-probs. Its metadata has how many were evicted before they were read
        (`tba.num_evicted`). Needs the extra `parquet` of the service."""
        content = await buffer.exports.parquet(wanted)
        return ExportResponse(content)

    @api.get("/rollouts/{rollout_id}", operation_id="get_rollout", dependencies=viewer)
    async def get_rollout(rollout_id: Annotated[str, Path(pattern="^[0-9a-f]{32}$")]) -> RolloutDetail:
        """Return everything that is stored about one rollout."""
        return await buffer.reader.get(rollout_id)

    @api.post("/rescore", operation_id="start_rescore", dependencies=auth.only("operator"))
    async def start_rescore(body: RescoreRequest) -> RescoreInfo:
        """Start a job that scores stored rollouts again; a repeated request returns the job that already runs."""
        return await buffer.rescore_jobs.start(body)

    @api.get("/rescore", operation_id="rescore", dependencies=auth.only("viewer"))
    async def rescore() -> RescoreInfo:
        """Return the running re-scoring job, or the last one."""
        return await buffer.rescore_jobs.info()

    return api
