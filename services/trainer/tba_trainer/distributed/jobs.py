"""Jobs that a follower runs in threads beside its commands, and how the leader learns their results.

leader                                followers
a command that begins a job    -->    start a thread
"reply", now and then          -->    send the result, or nothing while the job is busy
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
"""Result of a job in one process: `error` and `kind` if it failed, else the keys that this kind of job returns."""
log = get_logger("jobs")


class Job:
    """Work that a follower does in a thread beside its commands. `reply` is the result; None while the work goes on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reply: Reply | None = None
        self.part: Part | None = None

    def start(self, work: Callable[[], Reply]) -> None:
        """Run `work` in a thread. Its result, or its error, becomes the reply."""

        def run() -> None:
            try:
                self.reply = work()
            except Exception as error:  # the leader says it
                self.fail(error)

        threading.Thread(target=run, name=self.name, daemon=True).start()

    def fail(self, error: Exception) -> None:
        """Log an error, and make it the reply."""
        log.warning("part_failed", part=self.name, error=str(error))
        self.reply = {"error": str(error) or repr(error), "kind": getattr(error, "slug", "")}


def give_reply(team: Team, jobs: dict[str, Job], name: str) -> None:
    """Answer `Replies.collect` (a collective; followers only): send a job's result once, nothing while it is busy."""
    found = jobs.get(name)
    reply = None if found is None else found.reply
    if reply is not None:
        jobs.pop(name, None)  # a new lineage clears them in another thread
    team.gather(b"" if reply is None else msgspec.msgpack.encode(reply))


class Replies:
    """The replies of the followers about one job (leader only)."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.of_rank: dict[int, Reply] = {}

    @property
    def missing(self) -> list[int]:
        """Ranks of the followers whose job has not ended."""
        return [rank for rank in range(1, self._team.num_ranks) if rank not in self.of_rank]

    def collect(self, command: str, **job: str) -> bool:
        """Send `command`, at which followers call `give_reply`; keep their replies. Return whether all jobs ended."""
        if self.missing:
            with self._team.lead(command, **job):
                answers = self._team.gather(b"")
            self.of_rank |= {rank: msgspec.msgpack.decode(data) for rank, data in enumerate(answers) if data}
        return not self.missing

    def failure(self, kinds: Sequence[type[TbaError]], other: type[TbaError]) -> TbaError | None:
        """Return the error of the failed process with the lowest rank; None: no process has failed.

        Args:
            kinds: types of errors that are kept.
            other: type that any other error becomes.
        """
        known = {kind.slug: kind for kind in kinds}
        for rank, reply in sorted(self.of_rank.items()):
            if "error" in reply:
                return known.get(reply["kind"], other)(f"process {rank}: {reply['error']}")
        return None
