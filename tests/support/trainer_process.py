"""Trainer processes over a recorded buffer and a real store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.support.buffer import SERVICE_PATHS
from tests.support.recorded_server import RecordedServer
from tests.support.trainer_values import RecordedBuffer, make_recipe

DEADLINE_S = 240.0


class TrainerProcesses:
    """One run, whose trainers start one after another; `close` ends what still runs."""

    def __init__(self, folder: Path, model: Path, **sections: dict[str, Any]) -> None:
        self.folder, self.buffer = folder, RecordedBuffer()
        self.server = RecordedServer(self.buffer)
        store = {"url": f"file://{folder / 'store'}", **sections.pop("store", {})}
        tracking = {"metrics_path": str(folder / "metrics.jsonl")}
        recipe = make_recipe(model, buffer={"url": self.server.url}, store=store, tracking=tracking, **sections)
        self.recipe_path = folder / "recipe.json"
        self.recipe_path.write_text(json.dumps(recipe.model_dump(mode="json")))
        self.versions = WeightVersions(FileStore(folder / "store"), "demo")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pace_s = 0.0
        """How long every ack takes once what `at_call` is asked for was done: a signal that takes its time must not
        find the run done."""

    def start(self, *, num_processes: int = 1) -> subprocess.Popen[bytes]:
        """Start the trainer, in several processes by torchrun."""
        module = ["tba_trainer"] if num_processes == 1 else ["tba_trainer.distributed.launch", str(num_processes)]
        with self._log_path(len(self.processes)).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, "--config", str(self.recipe_path)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def at_call(self, wanted: Callable[[str], bool], then: Callable[[], None]) -> threading.Event:
        """Do something once, when the trainer makes a call for which `wanted(method)` holds; it waits for the answer
        meanwhile. The event tells that it was done."""
        done = threading.Event()

        def before(method: str) -> None:
            if method == "ack" and done.is_set():
                time.sleep(self.pace_s)
            if not done.is_set() and wanted(method):
                done.set()
                then()

        self.buffer.before = before
        return done

    def end_of(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its end; returns the exit code."""
        return process.wait(DEADLINE_S)

    def log(self, number: int) -> str:
        """The output of the trainer that was started as `number`."""
        return self._log_path(number).read_text()

    def digests(self) -> dict[PolicyVersion, str]:
        """Of the parameters of every published version."""
        return {version: self.versions.manifest(version).params_sha256 for version in self.versions.versions()}

    def _log_path(self, number: int) -> Path:
        return self.folder / f"trainer-{number}.log"

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.server.close()


def workers_of(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """Rank -> process id of what torchrun has started."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid:
                pairs = (item.partition(b"=") for item in (folder / "environ").read_bytes().split(b"\0"))
                found[int(next(value for name, _, value in pairs if name == b"RANK"))] = int(folder.name)
        except (OSError, ValueError, StopIteration):  # no process, or gone meanwhile
            continue
    return found
