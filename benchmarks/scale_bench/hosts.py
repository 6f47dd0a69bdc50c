"""The processes of the searchers: start them, send them commands, collect their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scale_bench.plan import Event
from tests.support.buffer import SERVICE_PATHS

END_S = 120.0
"""Time for all searchers to drain."""


@dataclass
class Hosts:
    """A few processes among which the searchers are dealt out."""

    recipe_path: Path
    folder: Path
    num_hosts: int
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _host_of: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        """Start the processes."""
        paths = os.pathsep.join(str(path) for path in SERVICE_PATHS)
        for number in range(self.num_hosts):
            with self.log_path(number).open("wb") as log:
                command = ["--config", str(self.recipe_path), "--report", str(self._report_path(number))]
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.scale_bench.host", *command],
                    env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(process)

    def obey(self, event: Event) -> None:
        """Pass an event on to the host of its searcher.

        Raises:
            RuntimeError: that host has ended.
        """
        if event.what == "join":
            self._host_of[event.searcher_id] = len(self._host_of) % self.num_hosts
        self._tell(self._host_of[event.searcher_id], {"what": event.what, "searcher_id": event.searcher_id})

    def end(self) -> list[dict[str, Any]]:
        """All searchers drain, all processes end; the reports of all searchers.

        Raises:
            RuntimeError: a process failed.
        """
        for number in range(self.num_hosts):
            self._tell(number, {"what": "end"})
        reports = []
        for number, process in enumerate(self._processes):
            try:
                code = process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"host {number} did not end within {END_S:g} s: {self._log(number)}") from None
            if code:
                raise RuntimeError(f"host {number} ended with code {code}: {self._log(number)}")
            reports += json.loads(self._report_path(number).read_text())
        return reports

    def kill(self) -> None:
        """End whatever still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def log_path(self, number: int) -> Path:
        """The log of host `number`."""
        return self.folder / f"host-{number}.log"

    def _report_path(self, number: int) -> Path:
        return self.folder / f"host-{number}.json"

    def _log(self, number: int) -> str:
        return self.log_path(number).read_text()[-3000:]

    def _tell(self, number: int, command: dict[str, str]) -> None:
        pipe = self._processes[number].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise RuntimeError(f"host {number} has ended: {self._log(number)}") from None
