"""Client of the buffer service: rollouts, prompts, batches, versions, run control."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, TypeVar

from tba.api import (
    ACKNOWLEDGED_HEADER,
    AckRequest,
    BatchRequest,
    CheckpointList,
    CheckpointRequest,
    CommandRequest,
    EvalInfo,
    EvalRequest,
    EvalResults,
    EvaluateReply,
    EvaluateRequest,
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    LineageReply,
    LineageRequest,
    LoadRequest,
    OriginInfo,
    Prompt,
    PromptUpload,
    PromptUploadReply,
    PushReply,
    RescoreInfo,
    RescoreRequest,
    RollbackRequest,
    RunChanges,
    RunCommand,
    RunInfo,
    ScaleRequest,
    ScalingInfo,
    SettingsInfo,
    SettingsRequest,
    SnapshotInfo,
    SnapshotRequest,
    VersionReply,
    VersionRequest,
)
from tba.api.run import SETTINGS_HEADER
from tba.clients.run_reader import RunReader
from tba.clients.service_client import Reply, parse_reply
from tba.fields import StrictModel
from tba.wire import (
    Batch,
    Heartbeat,
    decode_batch,
    encode_heartbeat,
    encode_push,
)

M = TypeVar("M", bound=StrictModel)
Command = Literal["pause", "resume", "stop", "done", "fail", "accept-loss"]


class BufferClient(RunReader):
    """One method per endpoint; docs/api.md describes them. Every method raises ServiceError subclasses."""

    settings_revision = 0
    """Revision of the run's live settings in the last reply to a draw, ack or change."""
    _acknowledged = ""

    def _post(self, path: str, body: StrictModel, reply: type[M]) -> M:
        return parse_reply(self._call("POST", path, json=body.model_dump_json().encode()), reply)

    def upload_prompts(self, prompts: Sequence[Prompt]) -> PromptUploadReply:
        """Upload prompts; the same id with the same content is accepted again."""
        return self._post("/v1/prompts", PromptUpload(prompts=list(prompts)), PromptUploadReply)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Claim visits, waiting up to `wait_s` on the server.

        A retry is answered with the leases that the first request was granted.
        """
        body = request.model_dump_json().encode()
        # the client must not hang up before the server answers
        timeout_s = self._timeout_s + request.wait_s
        return parse_reply(self._call("POST", "/v1/leases", json=body, timeout_s=timeout_s), LeaseReply)

    def return_leases(self, request: LeaseReturn) -> None:
        """Give unfinished leases back; visits of refused leases end."""
        self._call("POST", "/v1/leases/return", json=request.model_dump_json().encode())

    def renew_leases(self, request: LeaseRenewal) -> LeaseRenewalReply:
        """Move the deadline of leases that the searcher still works on."""
        return self._post("/v1/leases/renew", request, LeaseRenewalReply)

    def push(self, payloads: Sequence[bytes]) -> PushReply:
        """Store encoded rollouts; an outcome per item. Acknowledged means durable.

        Raises:
            BusyError: flow control; try again after `retry_after_s`.
        """
        return parse_reply(self._call("POST", "/v1/rollouts", msgpack=encode_push(payloads)), PushReply)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send a sign of life; a trainer's repeats how much was acknowledged by the reply to its last one."""
        # a Redis that was restored from an old backup knows less than it has acknowledged; the trainer is the witness
        known = {ACKNOWLEDGED_HEADER: self._acknowledged} if self._acknowledged and beat.kind == "trainer" else {}
        reply = self._call("POST", "/v1/heartbeats", msgpack=encode_heartbeat(beat), headers=known)
        self._acknowledged = reply.headers.get(ACKNOWLEDGED_HEADER, self._acknowledged)

    def request_eval(self, request: EvalRequest) -> EvalInfo:
        """Ask for an evaluation of a published version; the same request again returns the same evaluation."""
        return self._post("/v1/evals", request, EvalInfo)

    def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Have a version evaluated now, as an operator; an evaluation that exists is returned as it is.

        Raises:
            ConflictError: no such version, or no held-out prompts.
        """
        return self._post("/v1/run/evaluate", request, EvaluateReply)

    def get_eval(self, eval_id: str) -> EvalInfo:
        """Return one evaluation."""
        return parse_reply(self._call("GET", f"/v1/evals/{eval_id}"), EvalInfo)

    def eval_results(self, eval_id: str, results: EvalResults) -> None:
        """Report the rewards of evaluation leases."""
        self._call("POST", f"/v1/evals/{eval_id}/results", json=results.model_dump_json(exclude_none=True).encode())

    def new_lineage(self, request: LineageRequest) -> LineageReply:
        """Start a lineage; return its number and fencing token."""
        return self._post("/v1/lineages", request, LineageReply)

    def announce_version(self, request: VersionRequest) -> VersionReply:
        """Announce a published version, so that searchers load it.

        Raises:
            FencedError: a newer lineage owns the run.
        """
        return self._post("/v1/versions", request, VersionReply)

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
            RollbackError: an operator has asked for a rollback.
            FencedError: a newer lineage owns the run.
        """
        response = self._call(
            # the server itself waits `wait_s`: the client must not hang up before it answers
            "POST",
            "/v1/batches",
            json=request.model_dump_json().encode(),
            timeout_s=request.wait_s + 30.0,
        )
        self._note_revision(response)
        return decode_batch(response.content)

    def ack(self, batch_id: str, request: AckRequest) -> None:
        """State that step (lineage, step) consumed the batch.

        Raises:
            VoidBatchError: draw a new batch for this step. FencedError: a newer lineage owns the run.
            RollbackError: an operator has asked for a rollback.
            ConflictError: the step has acked another batch, or a step was left out.
        """
        self._note_revision(self._call("POST", f"/v1/batches/{batch_id}/ack", json=request.model_dump_json().encode()))

    def run(self) -> RunInfo:
        """Return the state of the run, its components, waits and evaluations."""
        return parse_reply(self._call("GET", "/v1/run"), RunInfo)

    def settings(self, *, after: int = 0) -> SettingsInfo:
        """Return the live settings, and their changes after revision `after`."""
        return parse_reply(self._call("GET", "/v1/run/settings", params={"after": after}), SettingsInfo)

    def all_settings(self) -> SettingsInfo:
        """Return the live settings with every change of them."""
        info = self.settings()
        changes = list(info.changes)
        # the reply is bounded, so a long run needs several
        while info.next is not None:
            info = self.settings(after=info.next)
            changes += info.changes
        return info.model_copy(update={"changes": changes})

    def change_settings(self, request: SettingsRequest) -> SettingsInfo:
        """Change the live settings that `request.settings` sets, also those it sets to None.

        Returns:
            The settings as they are now, with this change alone.

        Raises:
            BadRequestError: a value is not possible, by itself or with the rest of the recipe.
            FencedError: the token is not that of the active lineage.
        """
        body = request.model_dump(mode="json", exclude={"settings"})
        # a setting that is set to None goes back to the recipe; one that is left out stays as it is
        body["settings"] = request.settings.model_dump(mode="json", exclude_unset=True)
        response = self._call("PATCH", "/v1/run/settings", json=json.dumps(body).encode())
        self._note_revision(response)
        return parse_reply(response, SettingsInfo)

    def scaling(self, *, after: int = 0) -> ScalingInfo:
        """Return how many searchers there should be and are, and the changes after revision `after`."""
        return parse_reply(self._call("GET", "/v1/run/searchers", params={"after": after}), ScalingInfo)

    def scale(self, request: ScaleRequest) -> ScalingInfo:
        """Change the number of searchers.

        Returns:
            The searchers as they are now, with this change alone.

        Raises:
            BadRequestError: more than `scaling.max_searchers`, or more than one for one server.
            ConflictError: nothing of tba starts searchers here, or the run is offline.
        """
        reply = self._call("PATCH", "/v1/run/searchers", json=request.model_dump_json().encode())
        return parse_reply(reply, ScalingInfo)

    def start_rescore(self, request: RescoreRequest) -> RescoreInfo:
        """Score the stored rollouts again; the same request returns the job that already runs for it.

        Raises:
            ConflictError: another job runs, or the reward service knows no reward for the task.
        """
        return self._post("/v1/rescore", request, RescoreInfo)

    def rescore(self) -> RescoreInfo:
        """Return the re-scoring job that runs, or the last one.

        Raises:
            NotFoundError: no job has ever run.
        """
        return parse_reply(self._call("GET", "/v1/rescore"), RescoreInfo)

    def save_snapshot(self, name: str) -> SnapshotInfo:
        """Begin to save what is stored.

        Raises:
            ConflictError: a snapshot of this name exists, or another such job runs.
        """
        return self._post("/v1/snapshots", SnapshotRequest(name=name), SnapshotInfo)

    def get_snapshot(self, name: str) -> SnapshotInfo:
        """Return one snapshot of this run.

        Raises:
            NotFoundError: there is no such snapshot, and none is being saved.
        """
        return parse_reply(self._call("GET", f"/v1/snapshots/{name}"), SnapshotInfo)

    def load_snapshot(self, request: LoadRequest) -> OriginInfo:
        """Begin the run with a snapshot.

        Raises:
            ConflictError: the run has begun with something else, or another such job runs.
        """
        return self._post("/v1/snapshots/load", request, OriginInfo)

    def _note_revision(self, reply: Reply) -> None:
        self.settings_revision = int(reply.headers.get(SETTINGS_HEADER, "0"))

    def run_changes(self, *, after: int = 0) -> RunChanges:
        """Return the changes of the run's state after number `after`: who changed it, when and why."""
        return parse_reply(self._call("GET", "/v1/run/changes", params={"after": after}), RunChanges)

    def command(self, name: Command, command: RunCommand) -> RunInfo:
        """Change the run (`CommandRequest`)."""
        return self._post("/v1/run", CommandRequest(command=name, **command.model_dump()), RunInfo)

    def checkpoints(self) -> list[str]:
        """Return the versions of the checkpoints that a rollback can return to, newest first."""
        return parse_reply(self._call("GET", "/v1/checkpoints"), CheckpointList).versions

    def rollback(self, request: RollbackRequest) -> RunInfo:
        """Have the trainer return to the newest checkpoint at or before `request.step`.

        Raises:
            ConflictError: there is no such checkpoint, the run is not running, or another rollback waits.
        """
        return self._post("/v1/run", CommandRequest(command="rollback", **request.model_dump()), RunInfo)
