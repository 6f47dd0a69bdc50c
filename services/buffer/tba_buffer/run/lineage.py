"""Lineages: every start of a trainer takes a number and a fencing token. Older tokens are refused from then on.

Publications, checkpoints, batches and acks carry the token. The scripts compare it with the active one in the same
atomic call that writes, so a zombie trainer can change nothing.
"""

from __future__ import annotations

import json
import secrets

from pydantic import ValidationError

from tba.api import CheckpointRequest, LineageReply, LineageRequest, RollbackInfo, VersionRequest
from tba.errors import ConflictError, FencedError, RollbackError, UnavailableError
from tba.fields import MAX_LINEAGE
from tba.versions import START, LineageTree, PolicyVersion
from tba_buffer.storage.context import Context, RunHash, needed
from tba_buffer.storage.redis_client import redis_errors


def fenced(what: str) -> FencedError:
    """Return the error for a stale token; `what` names the refused action."""
    return FencedError(f"{what} was refused: a newer trainer start owns this run; stop this trainer")


def rollback_waits(what: str, waiting: RollbackInfo | bytes) -> RollbackError:
    """Return the error that tells a trainer to roll back.

    Args:
        what: the refused action.
        waiting: the pending rollback, or its stored JSON.
    """
    if isinstance(waiting, bytes):
        try:
            waiting = RollbackInfo.model_validate_json(waiting)
        except ValidationError:  # the next draw says that Redis must be restored
            return RollbackError(f"{what} was refused: an operator has asked for a rollback, whose text is damaged")
    return RollbackError(f"{what} was refused: an operator has asked for a rollback to {waiting.version}")


def _parent(lineage: bytes, text: bytes) -> tuple[int, PolicyVersion]:
    """Parse a stored lineage: its number and the version that it started from."""
    number, parent = int(lineage), PolicyVersion.parse(json.loads(text)["parent"])
    if not parent.lineage < number <= MAX_LINEAGE:
        raise ValueError(f"lineage {number} cannot start from {parent}")
    return number, parent


class Lineages:
    """The lineage table. It starts lineages, and takes versions and checkpoints with the active token alone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.tree = LineageTree()
        self._active = self.history(START.lineage)

    async def load(self) -> None:
        """Read the lineage table from Redis."""
        with redis_errors("read the lineages"):
            raw = await self._context.redis.hgetall(self._context.keys.lineages)
        parents: dict[int, PolicyVersion] = {}
        for lineage, text in raw.items():
            name = lineage.decode(errors="replace")
            number, parent = needed(self._context.keys.lineages, name, lambda pair=(lineage, text): _parent(*pair))
            parents[number] = parent
        self.tree = LineageTree(parents)
        self._active = self.history(max(parents, default=START.lineage))

    def knows(self, lineage: int) -> bool:
        """Return whether the lineage table, as last loaded, has this lineage."""
        return lineage in self.tree.parents

    def history(self, lineage: int) -> dict[int, int]:
        """Return the last step of each lineage in the history of `lineage`; for `lineage`, a step beyond all others."""
        # from a step beyond all others: so the own steps of the lineage are in its history
        path = self.tree.ancestry(PolicyVersion(lineage, 10**12))
        return {version.lineage: version.step for version in path}

    def has_abandoned(self, version: PolicyVersion) -> bool:
        """Return whether the newest lineage of the table neither made `version` nor descends from it."""
        return version.step > self._active.get(version.lineage, -1)

    async def new(self, request: LineageRequest) -> LineageReply:
        """Start a lineage for a trainer from `request.parent`. A repeated request id gets the lineage that it took.

        In the same call, a registered checkpoint with a later step than the parent is replaced by the parent's or
        removed. A pending rollback ends if the start obeys it, or if the parent is not after its step.

        Raises:
            ConflictError: nothing was changed. The rollback to obey is no longer pending (read the run again); or no
                trainer made the parent version: it is not the start of its lineage, and was neither acked nor
                announced nor checkpointed nor forked from; or the request id took a lineage with another parent.
            SupersededError: this buffer process does not own the run.
        """
        parent, token = PolicyVersion.parse(request.parent), secrets.token_hex(16)
        now, trainer_id = self._context.clock(), request.trainer_id
        document = {"parent": str(parent), "trainer_id": trainer_id, "created_at_s": now}
        line = {  # the script puts the new number in place of the first "LINEAGE"
            "kind": "resume",
            "lineage": "LINEAGE",
            "parent": str(parent),
            "trainer_id": trainer_id,
            "resumed_at_s": now,
        }
        if parent.lineage == 0 and parent != START:
            raise ConflictError(f"no trainer made version {parent}: lineage 0 has only the starting model 0-0")
        reply = await self._context.scripts.run(
            "start_lineage",
            token=token,
            request_id=request.request_id,
            now_s=now,
            parent_lineage=parent.lineage,
            parent_step=parent.step,
            document=json.dumps(document),
            line=json.dumps(line),
            history=" ".join(map(str, self.tree.ancestry(parent))),
            checkpoint_key=request.checkpoint_key or None,
            is_rollback=request.rollback,
            obeys=request.obeys or None,
            in_process=request.in_process,
            fails=request.fails or None,
        )
        match reply[0]:
            case b"withdrawn":
                raise ConflictError(
                    f"the start of a trainer from {parent} was refused: the rollback that it obeys does not wait any "
                    "more; read the run again"
                )
            case b"unknown-lineage":
                raise ConflictError(
                    f"no trainer made version {parent}: lineage {parent.lineage} is unknown to this run"
                )
            case b"unknown-step":
                raise ConflictError(
                    f"no trainer made version {parent}: lineage {parent.lineage} acked no step {parent.step}, and "
                    "nobody announced or checkpointed that version"
                )
        # the table first: a poll that wakes up looks the new lineage up in it
        await self.load()
        self._context.notify_all()
        lineage, token = int(reply[1]), reply[2].decode()
        # a repeat is answered with the lineage that it took before, which must be the one that was meant
        if self.tree.parents[lineage] != parent:
            raise ConflictError(
                f"this request id took lineage {lineage} from version {self.tree.parents[lineage]}, not {parent}: "
                "every trainer start needs a request id of its own"
            )
        return LineageReply(lineage=lineage, token=token)

    async def publish(self, request: VersionRequest) -> int:
        """Announce a version in the log, and return its log position. A repeat returns the position of the first call.

        Raises:
            FencedError: a newer lineage owns the run.
            ConflictError: the version is not in the history of the active lineage.
        """
        version = PolicyVersion.parse(request.version)
        await self._check_token_and_history(version, request.token, f"the publication of version {version}")
        reply = await self._context.scripts.run(
            "publish",
            token=request.token,
            lineage=version.lineage,
            step=version.step,
            lag=self._context.recipe.sampling.lag_steps,
        )
        if reply[0] == b"fenced":
            raise fenced(f"the publication of version {version}")
        self._context.notify_all()
        return int(reply[1])

    async def checkpoint(self, request: CheckpointRequest) -> None:
        """Register a complete checkpoint as the one that a resume starts from.

        Raises:
            FencedError: a newer lineage owns the run.
            RollbackError: a rollback is pending, and the trainer might delete the checkpoint that it returns to.
            ConflictError: the version is not in the history of the active lineage.
        """
        version, what = PolicyVersion.parse(request.version), f"the checkpoint of version {request.version}"
        await self._check_token_and_history(version, request.token, what)
        reply = await self._context.scripts.run(
            "register_checkpoint",
            token=request.token,
            version=str(version),
            key=request.key,
            kept=" ".join(request.kept or ()),
        )
        if reply[0] == b"fenced":
            raise fenced(what)
        if reply[0] == b"rollback":
            raise rollback_waits(what, reply[1])

    async def _check_token_and_history(self, version: PolicyVersion, token: str, what: str) -> None:
        # only the history needs this read: the script that follows compares the token once more
        run = await RunHash.read(self._context)
        if run.token != token:
            raise fenced(what)
        # whoever takes the token takes a lineage: without one, nothing is decided by a guess
        if not run.raw.get(b"lineage"):
            raise UnavailableError(
                f"the field lineage of {self._context.keys.run} in Redis is missing; restore Redis from a copy"
            )
        if version.step > self.history(run.lineage).get(version.lineage, -1):
            raise ConflictError(f"{what} was refused: it is not in the history of lineage {run.lineage}")
