"""Change the state of the run, which says what is allowed now.

running <-> paused        pause (operator, or a guard of the trainer with the active token), resume (operator)
done -> running           resume (operator), before a trainer starts; only while steps of trainer.num_steps are left
running, paused -> stopping        stop (operator): no new visits, no new batches; evaluations continue
any -> done, failed                done, fail (the trainer with the active token)
running -> failed                  the buffer itself: a reward function raises for every item
stopping, done, failed -> running  a new lineage: a trainer starts again

A pending rollback (run/rollback.py) forbids `done`; a stop or a failure withdraws it.
Every change adds a line to the audit in the same call.
"""

from __future__ import annotations

from typing import Literal

from tba.api import MAX_CHANGES_PER_PAGE, RunChange, RunChanges, RunCommand, RunState
from tba.api.run import AuditRole, Role
from tba.errors import ConflictError
from tba.logs import get_logger
from tba_buffer.run.lineage import fenced, rollback_waits
from tba_buffer.run.state import RunStateReader
from tba_buffer.storage.context import Context, read_lines

log = get_logger("run")
Command = Literal["pause", "resume", "stop", "done", "fail"]

# command -> (state it leads to, states it starts from, whether it needs the active token)
COMMANDS: dict[Command, tuple[RunState, tuple[RunState, ...], bool]] = {
    "pause": ("paused", ("running",), False),
    "resume": ("running", ("paused", "done"), False),
    "stop": ("stopping", ("running", "paused"), False),
    "done": ("done", ("running", "paused", "stopping", "failed"), True),
    "fail": ("failed", ("running", "paused", "stopping"), True),
}


class RunControl:
    """Changes the state of the run, and reads the audit of its changes.

    Args:
        context: Redis and settings.
        state: reads the state of the run.
    """

    def __init__(self, context: Context, state: RunStateReader) -> None:
        self._context = context
        self._state = state

    async def changes(self, *, after: int, limit: int = MAX_CHANGES_PER_PAGE) -> RunChanges:
        """Return at most `limit` changes of the state after change number `after`, oldest first."""
        key = self._context.keys.run_changes
        changes, more = await read_lines(self._context, key, RunChange, after=after, limit=limit)
        return RunChanges(changes=changes, next=more)

    async def command(self, name: Command, command: RunCommand, role: Role) -> None:
        """Change the state of the run. A command to the state that the run has already changes nothing.

        Args:
            role: who asks, for the audit.

        Raises:
            FencedError: done or fail without the active token; any command with another token.
            RollbackError: done, while a rollback is pending.
            ConflictError: the current state does not allow the command.
        """
        _, allowed_from, needs_token = COMMANDS[name]
        # a token that is sent is always checked, so that a trainer that was replaced cannot pause or stop the run
        checks_token = needs_token or command.token is not None
        num_steps = self._context.recipe.trainer.num_steps
        # a run that has all of its steps would be running for ever: no trainer comes to end it
        if name == "resume" and (await self._state.read_fields()).step >= num_steps:
            allowed_from = ("paused",)
        reply = await self._change(name, command, role, allowed_from=allowed_from, checks_token=checks_token)
        if reply[0] == b"fenced":
            raise fenced(f"the command {name!r}")
        if reply[0] == b"rollback":
            raise rollback_waits(f"the command {name!r}", reply[1])
        if reply[0] == b"refused":
            raise ConflictError(
                f"{name!r} is not possible while the run is {reply[1].decode(errors='replace')}; "
                f"it is possible while it is {' or '.join(allowed_from)}"
                f"{f', or done with a larger trainer.num_steps than {num_steps}' if name == 'resume' else ''}"
            )
        self._context.notify_all()

    async def fail_for_reward(self, reason: str) -> None:
        """Fail a running run because its rewards can never be known.

        In any other state, and before a trainer has started, nothing changes.
        """
        # read first: a run without a trainer, or one that has ended, is left alone
        fields = await self._state.read_fields()
        if fields.state != "running" or not fields.lineage:
            return
        log.error("run_fails", reason=reason)
        command = RunCommand(reason=reason)
        await self._change("fail", command, "buffer", allowed_from=("running",), checks_token=False)
        self._context.notify_all()

    async def _change(
        self,
        name: Command,
        command: RunCommand,
        role: AuditRole,
        *,
        allowed_from: tuple[RunState, ...],
        checks_token: bool,
    ) -> list[bytes]:
        return await self._context.scripts.run(
            "command",
            state=COMMANDS[name][0],
            reason=command.reason,
            token=command.token,
            checks_token=checks_token,
            now_s=self._context.clock(),
            command=name,
            role=role,
            allowed_from=allowed_from,
        )
