"""What a follower does beside its commands, and how the leader learns what came of it.

leader                                followers
a command that begins a job    -->    start a thread
"reply", now and then          -->    say what came of it, or nothing while it is busy
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec.msgpack

from tba.errors import TbaError
from tba.logs import get_logger
from tba_trainer.checkpoints.parts import Part
from tba_trainer.distributed.process_group import Team

Reply = dict[str, Any]
"""Of one process: `error` and `kind` where it failed, else what it has done; empty while it is busy."""
log = get_logger("jobs")


class Job:
    """Something that a follower does beside its commands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reply: Reply | None = None
        self.part: Part | None = None

    def start(self, work: Callable[[], Reply]) -> None:
        """Do it in a thread."""

        def run() -> None:
            try:
                self.reply = work()
            except Exception as error:  # the leader says it
                self.fail(error)

        threading.Thread(target=run, name=self.name, daemon=True).start()

    def fail(self, error: Exception) -> None:
        """Note why it was not done."""
        log.warning("part_failed", part=self.name, error=str(error))
        self.reply = {"error": str(error) or repr(error), "kind": getattr(error, "slug", "")}


def give_reply(team: Team, jobs: dict[str, Job], name: str) -> None:
    """Say what came of a job, once, or that it is busy (followers)."""
    found = jobs.get(name)
    reply = None if found is None else found.reply
    if reply is not None:
        jobs.pop(name, None)  # a new lineage clears them in another thread
    team.gather(b"" if reply is None else msgspec.msgpack.encode(reply))


class Replies:
    """What the followers say of one job (leader only)."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.of_rank: dict[int, Reply] = {}

    @property
    def missing(self) -> list[int]:
        """Followers that have not ended it."""
        return [rank for rank in range(1, self._team.num_ranks) if rank not in self.of_rank]

    def collect(self, command: str, **job: str) -> bool:
        """Ask for them by a command in which every follower will `give_reply`; return whether all have ended."""
        if self.missing:
            with self._team.lead(command, **job):
                answers = self._team.gather(b"")
            self.of_rank |= {rank: msgspec.msgpack.decode(data) for rank, data in enumerate(answers) if data}
        return not self.missing

    def failure(self, kinds: Sequence[type[TbaError]], other: type[TbaError]) -> TbaError | None:
        """Return the error of the first process that has failed.

        Args:
            kinds: the errors that keep their type.
            other: any other's.
        """
        known = {kind.slug: kind for kind in kinds}
        for rank, reply in sorted(self.of_rank.items()):
            if "error" in reply:
                return known.get(reply["kind"], other)(f"process {rank}: {reply['error']}")
        return None
