"""The state of the run, in Redis: what is allowed now, and where the living lineage stands.

running <-> paused        pause (operator, or a guard of the trainer with the living token), resume (operator)
running, paused -> stopping        stop (operator): no new visits, no new batches; evaluations go on
any -> done, failed                done, fail (the trainer with the living token)
running -> failed                  the buffer itself: a reward function raises for every item
stopping, done, failed -> running  a new lineage: a trainer starts again

Every change is a line of the audit, written in the same call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, cast, get_args

from tba.api import MAX_CHANGES_PER_PAGE, RunChange, RunChanges, RunCommand, RunState
from tba.api.run import AuditRole
from tba.api.settings import Role
from tba.errors import ConflictError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import new_id
from tba_buffer.context import Context
from tba_buffer.lineage import fenced
from tba_buffer.redis_link import redis_errors

log = get_logger("run")
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
    num_lost_changes: int
    num_losses_accepted: int
    change: RunChange | None
    """The last one of the state."""


def read_state(context: Context, text: bytes | None) -> RunState:
    """The state of the run; one that is none is failed: nothing is drawn or leased in it."""
    state = "running" if text is None else text.decode(errors="replace")
    if state in get_args(RunState):
        context.unreadable.forget("run", "state")
        return cast(RunState, state)
    context.unreadable.note("run", "state", f"it is {state[:100]!r}", at_s=context.clock())
    return "failed"


def read_version(context: Context, name: str, text: bytes | None) -> str | None:
    """A version of the `run` hash; None where there is none, or one that cannot be read: then it is noted."""
    if text is None:
        context.unreadable.forget("run", name)  # a damaged one was taken away
        return None
    return context.read_or_note("run", name, lambda: str(PolicyVersion.parse(text.decode())))


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
        fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
        return RunFields(
            state=read_state(self._context, raw.get(b"state")),
            reason=fields.get("reason") or None,
            lineage=self._context.whole("lineage", fields.get("lineage")),
            token=fields.get("token"),
            step=self._context.whole("step", fields.get("step")),
            latest_version=read_version(self._context, "latest_version", raw.get(b"latest_version")),
            checkpoint=read_version(self._context, "checkpoint", raw.get(b"checkpoint")),
            checkpoint_key=fields.get("checkpoint_key"),
            num_rollbacks=self._context.whole("rollbacks", fields.get("rollbacks")),
            num_lost_changes=self._context.whole("changes_lost", fields.get("changes_lost")),
            num_losses_accepted=self._context.whole("losses_accepted", fields.get("losses_accepted")),
            change=self._read_change("last", fields["change"]) if "change" in fields else None,
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
        found = [self._read_change(str(number), line) for number, line in enumerate(lines, after + 1)]
        changes = [change for change in found if change is not None]
        return RunChanges(changes=changes, next=last if lines and last < num_lines else None)

    def _read_change(self, name: str, text: str | bytes) -> RunChange | None:
        return self._context.read_or_note("change", f"run {name}", lambda: RunChange.model_validate_json(text))

    async def command(self, name: Command, command: RunCommand, role: Role) -> None:
        """Change the state; repeating a command changes nothing.

        Args:
            role: who asks, for the audit.

        Raises:
            FencedError: done or fail without the living token; any command with another token.
            ConflictError: the state does not allow it.
            UnavailableError: Redis did not answer.
        """
        _, allowed_from, needs_token = COMMANDS[name]
        checks_token = needs_token or command.token is not None
        reply = await self._change(name, command, role, allowed_from=allowed_from, checks_token=checks_token)
        if reply[0] == b"fenced":
            raise fenced(f"the command {name!r}")
        if reply[0] == b"refused":
            raise ConflictError(
                f"{name!r} is not possible while the run is {reply[1].decode(errors='replace')}; "
                f"it is possible while it is {' or '.join(allowed_from)}"
            )
        self._context.changed.notify()

    async def retry_versions(self, command: RunCommand, role: Role) -> None:
        """Have every searcher try the versions again that it has refused; it hears of it with its next lease request.

        Args:
            role: who asks, for the audit.

        Raises:
            UnavailableError: Redis did not answer.
        """
        keys, said = self._context.keys, [json.dumps(role), json.dumps(command.reason)]
        args = [new_id("request"), self._context.clock(), *said]
        number = await self._context.scripts.run("retry_versions", [keys.run, keys.run_changes], args)
        log.info("versions_retried", number=number, reason=command.reason)

    async def fail_for_reward(self, reason: str) -> None:
        """Fail a running run because its rewards can never be known; nothing in any other state, or before a trainer.

        Raises:
            UnavailableError: Redis did not answer.
        """
        fields = await self.read()
        if fields.state != "running" or not fields.lineage:
            return
        log.error("run_fails", reason=reason)
        command = RunCommand(reason=reason)
        await self._change("fail", command, "buffer", allowed_from=("running",), checks_token=False)
        self._context.changed.notify()

    async def _change(
        self,
        name: Command,
        command: RunCommand,
        role: AuditRole,
        *,
        allowed_from: tuple[RunState, ...],
        checks_token: bool,
    ) -> list[bytes]:
        keys = self._context.keys
        said = [json.dumps(name), json.dumps(role), json.dumps(command.reason)]
        return await self._context.scripts.run(
            "command",
            [keys.run, keys.run_changes],
            [
                COMMANDS[name][0],
                command.reason or "",
                command.token or "",
                int(checks_token),
                self._context.clock(),
                *said,
                *allowed_from,
            ],
        )
