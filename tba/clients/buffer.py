"""Client of the buffer service: rollouts, prompts, batches, versions, run control."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote, urlencode

from tba import api
from tba.api.rollouts import RewardStatus
from tba.api.run import SETTINGS_HEADER
from tba.clients.service_client import Reply, ServiceClient, parse_reply
from tba.errors import BadReplyError, UnavailableError
from tba.fields import Boundary, Split, StrictModel
from tba.wire import Batch, Heartbeat, decode_batch, encode_heartbeat, encode_push
from tba.wire.sequences import FinishReason

M = TypeVar("M", bound=StrictModel)
Command = Literal["pause", "resume", "stop", "done", "fail", "accept-loss"]


EXPORT_CHUNK_BYTES = 1 << 20
EXPORT_SILENCE_S = 120.0
"""Longest wait for the next byte of an export: the service may read many rollouts before the next one that matches."""
PARQUET_END = b"PAR1"


class RolloutFilters(TypedDict, total=False):
    """Filters of stored rollouts; None: no filter. Bounds are inclusive."""

    prompt_id: str | None
    task: str | None
    version: str | None
    """Policy version that generated the rollout."""
    from_version: str | None
    to_version: str | None
    status: RewardStatus | None
    min_reward: float | None
    """Matches only scored rollouts, as `max_reward` does."""
    max_reward: float | None
    searcher_id: str | None
    finish_reason: FinishReason | None
    environment: str | None
    """Matches only episodes, as the two below do."""
    stop_condition: str | None
    failure_boundary: Boundary | None
    contains: str | None
    """Text to find in the response or the prompt, ignoring case."""


class BufferClient(ServiceClient):
    """Client of the buffer: one method per endpoint (docs/api.md), each of which raises subclasses of ServiceError."""

    settings_revision = 0
    """Revision of the run's live settings in the last reply to a draw, an ack or a change of settings."""
    _acknowledged = ""

    def _get(self, path: str, reply: type[M], **query: Any) -> M:
        return parse_reply(self._call("GET", path, params=_known(**query)), reply)

    def _send(self, path: str, body: StrictModel, *, method: str = "POST", timeout_s: float | None = None) -> Reply:
        return self._call(method, path, json=body.model_dump_json().encode(), timeout_s=timeout_s)

    def _post(self, path: str, body: StrictModel, reply: type[M]) -> M:
        return parse_reply(self._send(path, body), reply)

    def upload_prompts(self, prompts: Sequence[api.Prompt]) -> api.PromptUploadReply:
        """Upload prompts. A known id is accepted with the same content; with other content, the whole upload fails."""
        return self._post("/v1/prompts", api.PromptUpload(prompts=list(prompts)), api.PromptUploadReply)

    def lease(self, request: api.LeaseRequest) -> api.LeaseReply:
        """Claim visits; the server may hold the request for up to `request.wait_s`.

        A retry of the same request gets the leases that the first attempt was granted.
        """
        # the client must not hang up before the server answers
        reply = self._send("/v1/leases", request, timeout_s=self._timeout_s + request.wait_s)
        return parse_reply(reply, api.LeaseReply)

    def return_leases(self, request: api.LeaseReturn) -> None:
        """Give unfinished leases back; the visits of refused leases end."""
        self._send("/v1/leases/return", request)

    def renew_leases(self, request: api.LeaseRenewal) -> api.LeaseRenewalReply:
        """Extend leases that the searcher still works on; return the leases that it has lost."""
        return self._post("/v1/leases/renew", request, api.LeaseRenewalReply)

    def push(self, payloads: Sequence[bytes]) -> api.PushReply:
        """Store encoded rollouts; return the outcome of each. The stored ones are durable before the reply is sent.

        Raises:
            BusyError: flow control; try again after `retry_after_s`.
        """
        return parse_reply(self._call("POST", "/v1/rollouts", msgpack=encode_push(payloads)), api.PushReply)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send a heartbeat. A trainer also sends back the header `tba-acknowledged` of the previous reply."""
        # a Redis that was restored from an old backup knows less than it has acknowledged; the trainer is the witness
        known = {api.ACKNOWLEDGED_HEADER: self._acknowledged} if self._acknowledged and beat.kind == "trainer" else {}
        reply = self._call("POST", "/v1/heartbeats", msgpack=encode_heartbeat(beat), headers=known)
        self._acknowledged = reply.headers.get(api.ACKNOWLEDGED_HEADER, self._acknowledged)

    def request_eval(self, request: api.EvalRequest) -> api.EvalReply:
        """Ask for an evaluation of a published version; an existing one is returned and not repeated."""
        return self._post("/v1/evals", request, api.EvalReply)

    def get_eval(self, eval_id: str) -> api.EvalInfo:
        """Return the state and the numbers of one evaluation."""
        return self._get(f"/v1/evals/{eval_id}", api.EvalInfo)

    def eval_results(self, eval_id: str, results: api.EvalResults) -> None:
        """Report the results of evaluation leases."""
        self._call("POST", f"/v1/evals/{eval_id}/results", json=results.model_dump_json(exclude_none=True).encode())

    def new_lineage(self, request: api.LineageRequest) -> api.LineageReply:
        """Start a lineage; return its number and fencing token."""
        return self._post("/v1/lineages", request, api.LineageReply)

    def announce_version(self, request: api.VersionRequest) -> api.VersionReply:
        """Announce a published version, so that searchers load it."""
        return self._post("/v1/versions", request, api.VersionReply)

    def register_checkpoint(self, request: api.CheckpointRequest) -> None:
        """Register a complete checkpoint: the next resume starts from it."""
        self._send("/v1/checkpoints", request)

    def draw_batch(self, request: api.BatchRequest) -> Batch:
        """Draw a batch; the server may hold the request for up to `request.wait_s`.

        Raises:
            BusyError: no batch can be drawn yet; `wait` names the wait.
            RunOverError: the run is stopping, done or failed.
            RollbackError: an operator has asked for a rollback.
            FencedError: a newer lineage owns the run.
        """
        # the server itself waits `wait_s`: the client must not hang up before it answers
        reply = self._send("/v1/batches", request, timeout_s=request.wait_s + 30.0)
        self._note_revision(reply)
        return decode_batch(reply.content)

    def ack(self, batch_id: str, request: api.AckRequest) -> None:
        """Acknowledge a batch: step (lineage, step) consumed it.

        Raises:
            VoidBatchError: draw a new batch for this step. FencedError: a newer lineage owns the run.
            RollbackError: an operator has asked for a rollback.
            ConflictError: the step has acked another batch already, or the step before it has acked none.
        """
        self._note_revision(self._send(f"/v1/batches/{batch_id}/ack", request))

    def run(self) -> api.RunInfo:
        """Return the state of the run, its components, waits and evaluations."""
        return self._get("/v1/run", api.RunInfo)

    def settings(self, *, after: int = 0) -> api.SettingsInfo:
        """Return the live settings, and a page of their changes after revision `after`."""
        return self._get("/v1/run/settings", api.SettingsInfo, after=after)

    def all_settings(self) -> api.SettingsInfo:
        """Return the live settings with all their changes; this may take several requests."""
        info = self.settings()
        changes = list(info.changes)
        # the reply is bounded, so a long run needs several
        while info.next is not None:
            info = self.settings(after=info.next)
            changes += info.changes
        return info.model_copy(update={"changes": changes})

    def change_settings(self, request: api.SettingsRequest) -> api.SettingsInfo:
        """Change the live settings that are set in `request.settings`; one set to None returns to the recipe's value.

        Returns:
            The current settings; `changes` holds only this change.

        Raises:
            BadRequestError: a value is not possible, by itself or with the rest of the recipe.
            FencedError: the token is not that of the active lineage.
        """
        body = request.model_dump(mode="json", exclude={"settings"})
        # a setting that is set to None goes back to the recipe; one that is left out stays as it is
        body["settings"] = request.settings.model_dump(mode="json", exclude_unset=True)
        reply = self._call("PATCH", "/v1/run/settings", json=json.dumps(body).encode())
        self._note_revision(reply)
        return parse_reply(reply, api.SettingsInfo)

    def scaling(self, *, after: int = 0) -> api.ScalingInfo:
        """Return the desired and the actual number of searchers, and its changes after revision `after`."""
        return self._get("/v1/run/searchers", api.ScalingInfo, after=after)

    def scale(self, request: api.ScaleRequest) -> api.ScalingInfo:
        """Change the number of searchers.

        Returns:
            The current numbers; `changes` holds only this change.

        Raises:
            BadRequestError: more than `scaling.max_searchers`, or more than one searcher for one engine server.
            ConflictError: tba does not start searchers here (`scaling.backend`), or the run is offline.
        """
        return parse_reply(self._send("/v1/run/searchers", request, method="PATCH"), api.ScalingInfo)

    def start_rescore(self, request: api.RescoreRequest) -> api.RescoreInfo:
        """Start to score stored rollouts again; if a job for the same request is running, return that job."""
        return self._post("/v1/rescore", request, api.RescoreInfo)

    def rescore(self) -> api.RescoreInfo:
        """Return the re-scoring job that is running, or else the last one."""
        return self._get("/v1/rescore", api.RescoreInfo)

    def save_snapshot(self, name: str) -> api.SnapshotInfo:
        """Start to save a snapshot of the buffer; poll `get_snapshot` for its end."""
        return self._post("/v1/snapshots", api.SnapshotRequest(name=name), api.SnapshotInfo)

    def get_snapshot(self, name: str) -> api.SnapshotInfo:
        """Return the state of one snapshot of this run."""
        return self._get(f"/v1/snapshots/{name}", api.SnapshotInfo)

    def load_snapshot(self, request: api.LoadRequest) -> api.OriginInfo:
        """Start to load a snapshot, with whose rollouts the run begins."""
        return self._post("/v1/snapshots/load", request, api.OriginInfo)

    def _note_revision(self, reply: Reply) -> None:
        self.settings_revision = int(reply.headers.get(SETTINGS_HEADER, "0"))

    def run_changes(self, *, after: int = 0) -> api.RunChanges:
        """Return the changes of the run's state after number `after`: who changed it, when and why."""
        return self._get("/v1/run/changes", api.RunChanges, after=after)

    def command(self, name: Command, command: api.RunCommand) -> api.RunInfo:
        """Change the state of the run (see `CommandRequest`)."""
        return self._post("/v1/run", api.CommandRequest(command=name, **command.model_dump()), api.RunInfo)

    def checkpoints(self) -> list[str]:
        """Return the versions whose checkpoints a rollback can return to, newest first."""
        return self._get("/v1/checkpoints", api.CheckpointList).versions

    def rollback(self, request: api.RollbackRequest) -> api.RunInfo:
        """Have the trainer return to the newest checkpoint at or before `request.step`.

        Raises:
            ConflictError: there is no such checkpoint, the run is not running, or another rollback is waiting.
        """
        return self._post("/v1/run", api.CommandRequest(command="rollback", **request.model_dump()), api.RunInfo)

    # ---- What a viewer may ask ---------------------------------------------------------------------------------------

    def stats(self) -> api.Stats:
        """Return numbers about the stored rollouts, and counts since the run began."""
        return self._get("/v1/stats", api.Stats)

    def ledger(self, *, after: int = 0, limit: int = 1000) -> api.LedgerReply:
        """Return up to `limit` lines of the ledger (acked batches and resumes), without its first `after` lines."""
        return self._get("/v1/ledger", api.LedgerReply, after=after, limit=limit)

    def curves(
        self,
        *,
        names: Sequence[str] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 500,
    ) -> api.Curves:
        """Return the metrics of the steps, averaged into `max_points` points; a metric that no step has is all None."""
        listed = None if names is None else ",".join(names)
        bounds = {"from_step": from_step, "to_step": to_step, "max_points": max_points}
        return self._get("/v1/curves", api.Curves, names=listed, **bounds)

    def summary(self) -> api.RunSummary:
        """Return the state of the run by its numbers, with its evidence and a remedy, in sentences for people."""
        info = self._get("/v1/run", api.RunInfo, summary="true")
        if info.summary is None:
            raise BadReplyError(f"{self.base_url}/v1/run sent no summary; run the same tba release on every service")
        return info.summary

    def list_versions(self) -> api.WeightVersionList:
        """Return the newest weight versions in the object store."""
        return self._get("/v1/versions", api.WeightVersionList)

    def list_rollouts(
        self,
        *,
        order: api.RolloutOrder = "newest",
        limit: int = 20,
        cursor: str | None = None,
        text_chars: int = 1000,
        **filters: Unpack[RolloutFilters],
    ) -> api.RolloutPage:
        """Return a page of stored rollouts; pass its `next` as `cursor` to get the next page."""
        page = {"order": order, "limit": limit, "cursor": cursor, "text_chars": text_chars}
        return self._get("/v1/rollouts", api.RolloutPage, **page, **filters)

    def get_rollout(self, rollout_id: str) -> api.RolloutDetail:
        """Return all stored fields of one rollout."""
        return self._get(f"/v1/rollouts/{rollout_id}", api.RolloutDetail)

    def export_rollouts(self, path: str | Path, *, tokens: bool = True, **filters: Unpack[RolloutFilters]) -> int:
        """Write all stored rollouts that match to a Parquet file, oldest first. Return its size in bytes.

        The bytes go to `path` + ".part" first, so an interrupted export leaves no incomplete file at `path`.

        Args:
            path: the file; an existing one is replaced.
            tokens: whether to write the columns of tokens and log-probs.

        Raises:
            NotInstalledError: the service has no pyarrow.
            BusyError: too many exports run.
            UnavailableError: there is no connection, or it was interrupted.
            OSError: the file cannot be written.
        """
        part, query = Path(f"{path}.part"), urlencode(_known(tokens=str(tokens).lower(), **filters))
        try:
            with (
                part.open("w+b") as file,
                self._stream(f"/v1/rollouts.parquet?{query}", silence_s=EXPORT_SILENCE_S) as answer,
            ):
                for piece in answer.stream(EXPORT_CHUNK_BYTES):
                    file.write(piece)
                num_bytes = file.tell()
                # a proxy may end a stream that was cut as if it were whole; the last bytes of Parquet are these
                file.seek(max(0, num_bytes - len(PARQUET_END)))
                if file.read() != PARQUET_END:
                    raise UnavailableError(f"{self.base_url} cut the export after {num_bytes} bytes; try again")
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return num_bytes

    def list_prompts(
        self,
        *,
        split: Split | None = None,
        task: str | None = None,
        contains: str | None = None,
        order: api.PromptOrder = "upload",
        limit: int = 20,
        after: int = 0,
        text_chars: int = 1000,
    ) -> api.PromptPage:
        """Return a page of the prompts that match; pass its `next` as `after` to get the next page."""
        chosen = {"split": split, "task": task, "contains": contains}
        page = {"order": order, "limit": limit, "after": after, "text_chars": text_chars}
        return self._get("/v1/prompts", api.PromptPage, **chosen, **page)

    def get_prompt(self, prompt_id: str) -> api.PromptDetail:
        """Return one prompt, and its stored rollouts by policy version."""
        return self._get(f"/v1/prompts/{quote(prompt_id, safe='')}", api.PromptDetail)


def _known(**query: Any) -> dict[str, Any]:
    # a query without a value would be read as an empty text
    return {name: value for name, value in query.items() if value is not None}
