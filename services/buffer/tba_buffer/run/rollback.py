"""An operator's rollback: the run returns to an older checkpoint, in a new lineage.

    POST /v1/run -> rollback.lua: fields of the run hash, and a line of the audit
    draws, acks, checkpoints, `done` of the trainer -> RollbackError, until it starts a lineage that obeys the request
    POST /v1/lineages -> start_lineage.lua: removes the fields, in the call that starts the lineage

So the request outlives every process, and is obeyed once. It is pending only while the run is running or paused: a stop
or a failure withdraws it. A paused run rolls back at once and stays paused.

The checkpoints are listed from the object store. Only those that the trainer keeps are offered. The trainer names them
when it registers a checkpoint, and deletes the others only afterwards. While a rollback is pending, it can register
none. If kept checkpoints or lineage change while a request is handled, the checkpoints are listed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tba.api import RollbackRequest
from tba.concurrency import in_thread
from tba.errors import ConflictError, StoreError, UnavailableError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import checkpoint_prefix, complete_versions
from tba_buffer.run.lineage import Lineages
from tba_buffer.storage.context import Context, RunHash

_MOST_LISTINGS = 5
log = get_logger("rollback")


class Rollbacks:
    """Stores an operator's requests, and lists the checkpoints that a rollback can return to.

    Args:
        context: Redis and settings.
        lineages: give the history of the active lineage.
        open_store: returns the object store of the run; the first call opens it.
    """

    def __init__(self, context: Context, lineages: Lineages, open_store: Callable[[], ObjectStore]) -> None:
        self._context = context
        self._lineages = lineages
        self._open_store = open_store

    async def checkpoints(self, run: RunHash | None = None) -> list[PolicyVersion]:
        """Return the complete checkpoints in the active lineage's history that the trainer keeps, newest first.

        Args:
            run: gives the active lineage and the kept checkpoints; None: the run is read now.

        Raises:
            UnavailableError: Redis or the object store did not answer.
        """
        run = run or await RunHash.read(self._context)
        history, kept = self._lineages.history(run.lineage), run.checkpoints_kept
        prefix = checkpoint_prefix(self._context.run)
        try:
            found = await in_thread(lambda: complete_versions(self._open_store(), prefix))
        except StoreError as error:
            raise UnavailableError(f"the object store did not list the checkpoints: {error}") from None
        return [
            version
            for version in reversed(found)
            if version.step <= history.get(version.lineage, -1) and (kept is None or version in kept)
        ]

    async def request(self, request: RollbackRequest) -> None:
        """Store a request that the trainer returns to the newest checkpoint at or before `request.step`.

        Raises:
            ConflictError: no such checkpoint exists, the run is not running or paused, or another rollback is pending.
            UnavailableError: Redis or the object store did not answer.
        """
        for _ in range(_MOST_LISTINGS):
            run = await RunHash.read(self._context)
            found = await self.checkpoints(run)
            version = next((version for version in found if version.step <= request.step), None)
            # also without a checkpoint: the script knows the state of the run, and a request that was answered before
            to, now = None if version is None else str(version), self._context.clock()
            reply = await self._context.scripts.run(
                "rollback",
                request_id=request.request_id,
                version=to,
                request=json.dumps({"version": to, "at_s": now, **request.model_dump()}),
                now_s=now,
                reason=request.reason,
                lineage=run.raw.get(b"lineage") or b"",
                checkpoints_kept=run.raw.get(b"checkpoints_kept") or b"",
            )
            if reply[0] != b"changed":
                break
        match reply[0]:
            case b"state":
                raise ConflictError(
                    f"a rollback is not possible while the run is {reply[1].decode(errors='replace')}; it is possible "
                    "while it is running or paused"
                )
            case b"none":
                there = f"there are {', '.join(map(str, found))}" if found else "there is none so far"
                raise ConflictError(
                    f"no checkpoint of this run's history is at or before step {request.step}; {there} "
                    "(trainer.checkpoint_interval and trainer.keep_checkpoints decide)"
                )
            case b"waiting":
                raise ConflictError(
                    f"a rollback to {reply[1].decode(errors='replace')} waits for the trainer already; ask again once "
                    "it is done"
                )
            case b"changed":
                raise UnavailableError("the checkpoints of this run change too often to choose one of them; ask again")
        log.info("rollback_asked_for", version=str(version), step=request.step, reason=request.reason)
        # held draws end now: the trainer is told without waiting for a batch
        self._context.notify_all()
