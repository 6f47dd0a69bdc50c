"""`python -m benchmarks.scale_bench.host --config FILE --report FILE`: many searchers in one process, one event loop.

Each is the searcher service itself (`tba_searcher.service.Searcher`) with clients of its own; only the process is
shared. Commands come as JSON lines on stdin: {"what": "join" | "leave" | "vanish", "searcher_id": ...} and, last,
{"what": "end"}: all drain, and the report is written. Without a last command (the parent is gone) it ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba_searcher.service import CLIENT_RETRY_S, CLIENT_TIMEOUT_S, Clients, Searcher

from benchmarks.scale_bench.recording import RecordingClient
from tba.config import Recipe, load_recipe
from tba.errors import TbaError
from tba.logs import configure_logging

TICK_S = 0.25
"""A searcher with a process of its own uses a finer tick; here the ticks of hundreds would take a core."""
SWITCH_S = 0.0005
"""Threads of one interpreter take turns this often: a call must not wait for a hundred others."""


class Member:
    """One searcher of this host.

    Args:
        folder: of its weights; it exists.
    """

    def __init__(self, recipe: Recipe, folder: Path, searcher_id: str) -> None:
        self.searcher_id = searcher_id
        self.how_it_ended: str | None = None
        self.error: str | None = None
        self._stop = asyncio.Event()
        self._buffer = RecordingClient(
            recipe.buffer_url, token=None, retry_s=CLIENT_RETRY_S, timeout_s=CLIENT_TIMEOUT_S
        )
        self._clients = dataclasses.replace(Clients.from_recipe(recipe), buffer=self._buffer)
        self._searcher = Searcher(
            recipe, folder, searcher_id=searcher_id, clients=self._clients, stop=self._stop, tick_s=TICK_S
        )
        loop = asyncio.get_running_loop()
        self._began_s, self._ended_s = loop.time(), None
        self._task = asyncio.create_task(self._live())

    def leave(self) -> None:
        """SIGTERM: finish, push, return leases."""
        self._stop.set()

    def vanish(self) -> None:
        """SIGKILL: all its tasks are gone; what was on the wire still arrives."""
        if not self._task.done():
            self.how_it_ended = "vanished"
            self._task.cancel()

    async def ended(self) -> None:
        """Wait for its end."""
        await asyncio.wait([self._task])

    def report(self) -> dict[str, Any]:
        """Return the counts of this searcher, as JSON."""
        status, record = self._searcher.status, self._buffer.settle()
        return {
            "searcher_id": self.searcher_id,
            "how_it_ended": self.how_it_ended,
            "error": self.error,
            "lived_s": (self._ended_s or asyncio.get_running_loop().time()) - self._began_s,
            "num_unpushed": status.num_unpushed,
            "counts": dict(status.counts),
            **dataclasses.asdict(record),
        }

    async def _live(self) -> None:
        try:
            await self._searcher.run()
            self.how_it_ended = "drained"
        except TbaError as error:
            self.how_it_ended, self.error = "failed", str(error)
        finally:
            self._ended_s = asyncio.get_running_loop().time()
            for client in (self._clients.buffer, self._clients.heartbeats, self._clients.reward):
                client.close()


@dataclass
class Host:
    """The searchers of this process."""

    recipe: Recipe
    folder: Path
    members: dict[str, Member] = field(default_factory=dict)

    def obey(self, command: dict[str, str]) -> None:
        """One command about one searcher."""
        searcher_id = command["searcher_id"]
        if command["what"] == "join":
            folder = self.folder / searcher_id
            folder.mkdir()
            self.members[searcher_id] = Member(self.recipe, folder, searcher_id)
        elif command["what"] == "leave":
            self.members[searcher_id].leave()
        else:
            self.members[searcher_id].vanish()

    async def end(self) -> list[dict[str, Any]]:
        """All drain; their reports."""
        for member in self.members.values():
            member.leave()
        await asyncio.gather(*(member.ended() for member in self.members.values()))
        return [member.report() for member in self.members.values()]


async def serve(recipe: Recipe, folder: Path, report_path: Path) -> None:
    """Obey until the end."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    host = Host(recipe, folder)
    while line := await commands.readline():
        command = json.loads(line)
        if command["what"] == "end":
            report_path.write_text(json.dumps(await host.end()))
            return
        host.obey(command)


def main() -> None:
    """Run one host."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    recipe = load_recipe(args.config, environ={})
    sys.setswitchinterval(SWITCH_S)
    configure_logging(service="searchers", run=recipe.run.name)
    with tempfile.TemporaryDirectory(prefix="tba-searchers-", ignore_cleanup_errors=True) as folder:
        asyncio.run(serve(recipe, Path(folder), args.report))


if __name__ == "__main__":
    main()
