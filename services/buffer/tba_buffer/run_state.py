"""The state of the run, in Redis: what is allowed now, and where the living lineage stands.

running <-> paused        pause (operator, or a guard of the trainer with the living token), resume (operator)
running, paused -> stopping        stop (operator): no new visits, no new batches; evaluations go on
any -> done, failed                done, fail (the trainer with the living token)
stopping, done, failed -> running  a new lineage: a trainer starts again

Every change is a line of the audit, written in the same call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, cast

from tba.api import MAX_CHANGES_PER_PAGE, RunChange, RunChanges, RunCommand, RunState
from tba.api.settings import Role
from tba.errors import ConflictError
from tba_buffer.context import Context
from tba_buffer.lineage import fenced
from tba_buffer.redis_link import redis_errors

Command = Literal["pause", "resume", "stop", "done", "fail"]

# command -> (state it leads to, states it starts from, whether it needs the living token)
COMMANDS: dict[Command, tuple[RunState, tuple[RunState, ...], bool]] = {
    "pause": ("paused", ("running",), False),
    "resume": ("running", ("paused",), False),
    "stop": ("stopping", ("running", "paused"), False),
    "done": ("done", ("running", "paused", "stopping", "failed"), True),
    "fail": ("failed", ("running", "paused", "stopping"), True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFields:
    """The `run` hash. Versions are `lineage-step` texts; `step` is the last acked step of the living lineage."""

    state: RunState
    reason: str | None
    lineage: int
    token: str | None
    step: int
    latest_version: str | None
    checkpoint: str | None
    checkpoint_key: str | None
    num_rollbacks: int
    change: RunChange | None
    """The last one of the state."""


class RunControl:
    """Reads and changes the state of the run.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> RunFields:
        """The run as Redis has it.

        Raises:
            UnavailableError: Redis did not answer.
        """
        with redis_errors("read the run"):
            raw = await self._context.redis.hgetall(self._context.keys.run)
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        return RunFields(
            state=cast(RunState, fields.get("state", "running")),
            reason=fields.get("reason") or None,
            lineage=int(fields.get("lineage", 0)),
            token=fields.get("token"),
            step=int(fields.get("step", 0)),
            latest_version=fields.get("latest_version"),
            checkpoint=fields.get("checkpoint"),
            checkpoint_key=fields.get("checkpoint_key"),
            num_rollbacks=int(fields.get("rollbacks", 0)),
            change=RunChange.model_validate_json(fields["change"]) if "change" in fields else None,
        )

    async def changes(self, *, after: int, limit: int = MAX_CHANGES_PER_PAGE) -> RunChanges:
        """At most `limit` changes of the state after one of them, oldest first.

        Raises:
            UnavailableError: Redis did not answer.
        """
        key, last = self._context.keys.run_changes, after + limit
        with redis_errors("read the audit of the run"):
            async with self._context.redis.pipeline(transaction=True) as pipe:
                pipe.lrange(key, after, last - 1)
                pipe.llen(key)
                lines, num_lines = await pipe.execute()
        changes = [RunChange.model_validate_json(line) for line in lines]
        return RunChanges(changes=changes, next=last if changes and last < num_lines else None)

    async def command(self, name: Command, command: RunCommand, role: Role) -> None:
        """Change the state; repeating a command changes nothing.

        Args:
            role: who asks, for the audit.

        Raises:
            FencedError: done or fail without the living token; any command with another token.
            ConflictError: the state does not allow it.
            UnavailableError: Redis did not answer.
        """
        state, allowed_from, needs_token = COMMANDS[name]
        checks_token = needs_token or command.token is not None
        keys = self._context.keys
        said = [json.dumps(name), json.dumps(role), json.dumps(command.reason)]
        reply = await self._context.scripts.run(
            "command",
            [keys.run, keys.run_changes],
            [
                state,
                command.reason or "",
                command.token or "",
                int(checks_token),
                self._context.clock(),
                *said,
                *allowed_from,
            ],
        )
        if reply[0] == b"fenced":
            raise fenced(f"the command {name!r}")
        if reply[0] == b"refused":
            raise ConflictError(
                f"{name!r} is not possible while the run is {reply[1].decode()}; "
                f"it is possible while it is {' or '.join(allowed_from)}"
            )
        self._context.changed.notify()
