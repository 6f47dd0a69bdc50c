"""Client of the buffer service: rollouts, prompts, batches, versions, run control."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from tba.api import (
    ACKNOWLEDGED_HEADER,
    AcceptLoss,
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    EvalInfo,
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
    LoadRequest,
    MarkReply,
    MarkRequest,
    OriginInfo,
    Prompt,
    PromptUpload,
    PromptUploadReply,
    PushReply,
    RescoreInfo,
    RescoreRequest,
    RolloutDetail,
    RolloutOrder,
    RolloutPage,
    RunChanges,
    RunCommand,
    RunEvent,
    RunInfo,
    SampleRequest,
    ScaleRequest,
    ScalingInfo,
    SettingsInfo,
    SettingsRequest,
    SnapshotInfo,
    SnapshotList,
    SnapshotRequest,
    Stats,
)
from tba.api.rollouts import RewardStatus
from tba.api.settings import SETTINGS_HEADER
from tba.clients.http import Reply, ServiceClient, parse_reply
from tba.clients.sse import read_events, run_event
from tba.config.base import StrictModel
from tba.wire import (
    Batch,
    Heartbeat,
    Rollout,
    decode_batch,
    decode_push,
    decode_rollout,
    encode_heartbeat,
    encode_push,
)

MAX_SAMPLE_BYTES = 1 << 30
EVENT_CHUNK_BYTES = 1 << 16
M = TypeVar("M", bound=StrictModel)
Command = Literal["pause", "resume", "stop", "done", "fail"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rollouts that were read by priority; the same seed at the same log position draws the same ones."""

    rollouts: list[Rollout]
    seed: int
    log_position: int


class BufferClient(ServiceClient):
    """One method per endpoint; docs/api.md describes them. Every method raises ServiceError subclasses."""

    settings_revision = 0
    """Revision of the run's live settings, as the last batch, ack or change was answered with it."""
    _acknowledged = ""

    def _post(self, path: str, body: StrictModel, reply: type[M]) -> M:
        return parse_reply(self._call("POST", path, json=body.model_dump_json().encode()), reply)

    def upload_prompts(self, prompts: Sequence[Prompt]) -> PromptUploadReply:
        """Upload prompts; the same id with the same content is accepted again."""
        return self._post("/v1/prompts", PromptUpload(prompts=list(prompts)), PromptUploadReply)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Claim visits; the same request again (a retry) is answered with the leases that it was granted."""
        return self._post("/v1/leases", request, LeaseReply)

    def return_leases(self, request: LeaseReturn) -> None:
        """Give unfinished leases back; visits of refused leases end."""
        self._call("POST", "/v1/leases/return", json=request.model_dump_json().encode())

    def renew_leases(self, request: LeaseRenewal) -> LeaseRenewalReply:
        """Move the deadline of leases that are still worked on."""
        return self._post("/v1/leases/renew", request, LeaseRenewalReply)

    def push(self, payloads: Sequence[bytes]) -> PushReply:
        """Store encoded rollouts; an outcome per item. Acknowledged means durable.

        Raises:
            BusyError: flow control; try again after `retry_after_s`.
        """
        return parse_reply(self._call("POST", "/v1/rollouts", msgpack=encode_push(payloads)), PushReply)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send a sign of life; a trainer's says how much was acknowledged, as the reply to the last one said."""
        known = {ACKNOWLEDGED_HEADER: self._acknowledged} if self._acknowledged and beat.kind == "trainer" else {}
        reply = self._call("POST", "/v1/heartbeats", msgpack=encode_heartbeat(beat), headers=known)
        self._acknowledged = reply.headers.get(ACKNOWLEDGED_HEADER, self._acknowledged)

    def request_eval(self, request: EvalRequest) -> EvalInfo:
        """Ask for an evaluation of a published version; the same request again answers the same evaluation."""
        return self._post("/v1/evals", request, EvalInfo)

    def get_eval(self, eval_id: str) -> EvalInfo:
        """One evaluation."""
        return parse_reply(self._call("GET", f"/v1/evals/{eval_id}"), EvalInfo)

    def eval_results(self, eval_id: str, results: EvalResults) -> None:
        """Report the rewards of evaluation leases."""
        self._call("POST", f"/v1/evals/{eval_id}/results", json=results.model_dump_json().encode())

    def new_lineage(self, request: LineageRequest) -> LineageReply:
        """A trainer starts: a new lineage number and fencing token."""
        return self._post("/v1/lineages", request, LineageReply)

    def mark(self, request: MarkRequest) -> MarkReply:
        """Announce a published version and set the sync mark.

        Raises:
            FencedError: a newer lineage owns the run.
        """
        return self._post("/v1/marks", request, MarkReply)

    def register_checkpoint(self, request: CheckpointRequest) -> None:
        """Make a complete checkpoint the one that a resume starts from.

        Raises:
            FencedError: a newer lineage owns the run.
        """
        self._call("POST", "/v1/checkpoints", json=request.model_dump_json().encode())

    def draw_batch(self, request: BatchRequest) -> Batch:
        """Draw a batch, waiting up to `wait_s` on the server.

        Raises:
            BusyError: none can be drawn yet; `wait` names what is waited for.
            RunOverError: the run is stopping, done or failed.
            FencedError: a newer lineage owns the run.
        """
        response = self._call(
            "POST", "/v1/batches", json=request.model_dump_json().encode(), timeout_s=request.wait_s + 30.0
        )
        self._hear(response)
        return decode_batch(response.content)

    def sample(self, num: int, *, seed: int | None = None) -> Sample:
        """Read `num` (at most 512) stored rollouts by priority; nothing is recorded.

        Raises:
            BusyError: no scored rollout is stored yet (wait "rollouts").
        """
        body = SampleRequest(num=num, seed=seed).model_dump_json().encode()
        response = self._call("POST", "/v1/samples", json=body)
        payloads = decode_push(response.content, max_bytes=MAX_SAMPLE_BYTES)
        return Sample(
            rollouts=[decode_rollout(payload) for payload in payloads],
            seed=int(response.headers["tba-seed"]),
            log_position=int(response.headers["tba-log-position"]),
        )

    def ack(self, batch_id: str, request: AckRequest) -> None:
        """State that step (lineage, step) consumed the batch.

        Raises:
            VoidBatchError: draw a new batch for this step. FencedError: a newer lineage owns the run.
            ConflictError: the step has acked another batch, or a step was left out.
        """
        self._hear(self._call("POST", f"/v1/batches/{batch_id}/ack", json=request.model_dump_json().encode()))

    def run(self) -> RunInfo:
        """State of the run, components, waits, evaluations."""
        return parse_reply(self._call("GET", "/v1/run"), RunInfo)

    def events(self, *, last_event_id: str | None = None, silence_s: float = 30.0) -> Generator[RunEvent]:
        """What happens in the run, as it happens: first the event `run`, or what came after `last_event_id`.

        Ends when the service ends the stream. Another one, with the last id that was got, goes on there.

        Args:
            silence_s: a connection on which not even a comment comes for so long is given up.

        Raises:
            BusyError: as many streams are open as may be.
            UnavailableError: no connection, or it was cut.
            BadReplyError: what came is no stream of events.
        """
        headers = {} if last_event_id is None else {"last-event-id": last_event_id}
        with self._stream("/v1/events", headers=headers, silence_s=silence_s) as answer:
            for sent in read_events(answer.stream(EVENT_CHUNK_BYTES)):
                yield run_event(sent)

    def settings(self, *, after: int = 0) -> SettingsInfo:
        """The live settings, and the changes after revision `after`."""
        return parse_reply(self._call("GET", "/v1/run/settings", params={"after": after}), SettingsInfo)

    def change_settings(self, request: SettingsRequest) -> SettingsInfo:
        """Change live settings: those that `request.settings` was given, None among them.

        Returns:
            The settings as they are now; of the changes, this one.

        Raises:
            BadRequestError: a value is not possible, by itself or with the rest of the recipe.
            FencedError: the token is not that of the living lineage.
        """
        body = request.model_dump(mode="json", exclude={"settings"})
        body["settings"] = request.settings.model_dump(mode="json", exclude_unset=True)
        response = self._call("PATCH", "/v1/run/settings", json=json.dumps(body).encode())
        self._hear(response)
        return parse_reply(response, SettingsInfo)

    def scaling(self, *, after: int = 0) -> ScalingInfo:
        """How many searchers are wanted and alive, and the changes after revision `after`."""
        return parse_reply(self._call("GET", "/v1/run/searchers", params={"after": after}), ScalingInfo)

    def scale(self, request: ScaleRequest) -> ScalingInfo:
        """Change the number of searchers.

        Returns:
            The searchers as they are now; of the changes, this one.

        Raises:
            BadRequestError: more than `scaling.max_searchers`.
            ConflictError: nothing of tba starts searchers here, or the run is offline.
        """
        reply = self._call("PATCH", "/v1/run/searchers", json=request.model_dump_json().encode())
        return parse_reply(reply, ScalingInfo)

    def stats(self) -> Stats:
        """Counts of the buffer."""
        return parse_reply(self._call("GET", "/v1/stats"), Stats)

    def list_rollouts(
        self,
        *,
        order: RolloutOrder = "newest",
        prompt_id: str | None = None,
        version: str | None = None,
        status: RewardStatus | None = None,
        limit: int = 20,
        cursor: str | None = None,
        text_chars: int = 1000,
    ) -> RolloutPage:
        """A page of stored rollouts; the `next` of a page is the `cursor` of the one after it."""
        query = {
            "order": order,
            "prompt_id": prompt_id,
            "version": version,
            "status": status,
            "limit": limit,
            "cursor": cursor,
            "text_chars": text_chars,
        }
        known = {name: value for name, value in query.items() if value is not None}
        return parse_reply(self._call("GET", "/v1/rollouts", params=known), RolloutPage)

    def get_rollout(self, rollout_id: str) -> RolloutDetail:
        """Everything that is stored of one rollout."""
        return parse_reply(self._call("GET", f"/v1/rollouts/{rollout_id}"), RolloutDetail)

    def start_rescore(self, request: RescoreRequest) -> RescoreInfo:
        """Score the stored rollouts again; the same request answers the job that runs for it.

        Raises:
            ConflictError: another job runs, or the reward service knows no reward for the task.
        """
        return self._post("/v1/rescore", request, RescoreInfo)

    def rescore(self) -> RescoreInfo:
        """The re-scoring job that runs, or the last one.

        Raises:
            NotFoundError: there never was one.
        """
        return parse_reply(self._call("GET", "/v1/rescore"), RescoreInfo)

    def cancel_rescore(self) -> RescoreInfo:
        """End the re-scoring job; what is scored again already stays so."""
        return parse_reply(self._call("POST", "/v1/rescore/cancel"), RescoreInfo)

    def ledger(self, *, after: int = 0, limit: int = 1000) -> LedgerReply:
        """Acked batches in order, from position `after`."""
        reply = self._call("GET", "/v1/ledger", params={"after": after, "limit": limit})
        return parse_reply(reply, LedgerReply)

    def save_snapshot(self, name: str) -> SnapshotInfo:
        """Begin to save what is stored.

        Raises:
            ConflictError: a snapshot of this name exists, or another such job goes on.
        """
        return self._post("/v1/snapshots", SnapshotRequest(name=name), SnapshotInfo)

    def get_snapshot(self, name: str) -> SnapshotInfo:
        """One snapshot of this run.

        Raises:
            NotFoundError: there is none, and none is being saved.
        """
        return parse_reply(self._call("GET", f"/v1/snapshots/{name}"), SnapshotInfo)

    def snapshots(self) -> list[str]:
        """The names of the complete snapshots of this run."""
        return parse_reply(self._call("GET", "/v1/snapshots"), SnapshotList).names

    def load_snapshot(self, request: LoadRequest) -> OriginInfo:
        """Begin the run with a snapshot.

        Raises:
            ConflictError: the run has begun with something else, or another such job goes on.
        """
        return self._post("/v1/snapshots/load", request, OriginInfo)

    def _hear(self, reply: Reply) -> None:
        self.settings_revision = int(reply.headers.get(SETTINGS_HEADER, "0"))

    def run_changes(self, *, after: int = 0) -> RunChanges:
        """Who changed the state of the run, when and why: the changes after number `after`."""
        return parse_reply(self._call("GET", "/v1/run/changes", params={"after": after}), RunChanges)

    def retry_versions(self, command: RunCommand) -> RunInfo:
        """Have searchers try the weight versions again that they have refused."""
        return self._post("/v1/run/retry-versions", command, RunInfo)

    def command(self, name: Command, command: RunCommand) -> RunInfo:
        """Change the state of the run."""
        return self._post(f"/v1/run/{name}", command, RunInfo)

    def accept_loss(self, request: AcceptLoss) -> RunInfo:
        """Go on without what Redis has lost of what was acknowledged; nothing when nothing is lost."""
        return self._post("/v1/run/accept-loss", request, RunInfo)
