"""Trainer processes that talk to a recorded buffer over HTTP, and to a real store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tba_trainer.distributed.leader import encode_drawn_batch

from tba.api import (
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    CommandRequest,
    EvalRequest,
    LineageRequest,
    VersionRequest,
)
from tba.errors import TbaError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import decode_heartbeat
from tests.support import loopback
from tests.support.trainer_values import RecordedBuffer, make_recipe


class RecordedServer(loopback.Server):
    """Serves a recorded buffer at `url` until it is closed."""

    def __init__(self, buffer: RecordedBuffer) -> None:
        self.buffer = buffer
        super().__init__(_handler(buffer))

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a trainer that was killed
            super().handle_error(request, client_address)


def _handler(buffer: RecordedBuffer) -> type[loopback.Handler]:
    class Handler(loopback.Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.body()
            try:
                status, content = 200, _reply(buffer, self.path.partition("?")[0].removeprefix("/v1/"), body)
            except TbaError as error:
                problem = {"type": f"urn:tba:problem:{error.slug}", "status": error.status, "detail": str(error)}
                status, content = error.status, json.dumps(problem).encode()
            self.answer(status, content)

        do_GET = do_POST

    return Handler


def _reply(buffer: RecordedBuffer, path: str, body: bytes) -> bytes:
    parts = path.split("/")
    match parts:
        case ["run"] if body:
            request = CommandRequest.model_validate_json(body)
            reply: Any = buffer.command(request.command, request)
        case ["run"]:
            reply = buffer.run()
        case ["run", "settings"]:
            reply = buffer.settings()
        case ["lineages"]:
            reply = buffer.new_lineage(LineageRequest.model_validate_json(body))
        case ["versions"]:
            reply = buffer.announce_version(VersionRequest.model_validate_json(body))
        case ["checkpoints"]:
            reply = buffer.register_checkpoint(CheckpointRequest.model_validate_json(body))
        case ["batches"]:
            return encode_drawn_batch(buffer.draw_batch(BatchRequest.model_validate_json(body)))
        case ["batches", batch_id, "ack"]:
            reply = buffer.ack(batch_id, AckRequest.model_validate_json(body))
        case ["evals"]:
            reply = buffer.request_eval(EvalRequest.model_validate_json(body))
        case ["evals", eval_id]:
            reply = buffer.get_eval(eval_id)
        case ["heartbeats"]:
            reply = buffer.heartbeat(decode_heartbeat(body))
        case _:
            raise AssertionError(f"no trainer calls {path}")
    return b"" if reply is None else reply.model_dump_json().encode()


DEADLINE_S = 240.0


UPLOADS_BESIDE = """
import runpy
from tba_trainer.loop import limits
limits.BACKGROUND_BYTES = 0
runpy.run_module("tba_trainer", run_name="__main__", alter_sys=True)
"""
"""Code of a trainer that uploads even the smallest checkpoint in the background."""


class StartedTrainers:
    """Trainers that start one after another in a folder; `close` kills those that still run."""

    def __init__(self, folder: Path, recipe_path: Path) -> None:
        self.folder, self.recipe_path = folder, recipe_path
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, *words: str, command: Sequence[str] = ("-m", "tba_trainer")) -> subprocess.Popen[bytes]:
        """Start a trainer with more words on its command line."""
        with self._log_path(len(self.processes)).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command, "--config", str(self.recipe_path), *words], stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def log(self, number: int) -> str:
        """Return the output of a trainer, by its number in the order of starts (from 0)."""
        return self._log_path(number).read_text()

    def _log_path(self, number: int) -> Path:
        return self.folder / f"trainer-{number}.log"

    def close(self) -> None:
        """Kill the trainers that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


class TrainerProcesses(StartedTrainers):
    """The trainers of one run over a recorded buffer."""

    def __init__(self, folder: Path, model: Path, **sections: dict[str, Any]) -> None:
        self.buffer = RecordedBuffer()
        self.server = RecordedServer(self.buffer)
        store = {"url": f"file://{folder / 'store'}", **sections.pop("store", {})}
        tracking = {"metrics_path": str(folder / "metrics.jsonl")}
        recipe = make_recipe(model, buffer={"url": self.server.url}, store=store, tracking=tracking, **sections)
        super().__init__(folder, folder / "recipe.json")
        self.recipe_path.write_text(json.dumps(recipe.model_dump(mode="json")))
        self.versions = WeightVersions(FileStore(folder / "store"), "demo")
        self.uploads_beside = False
        self.pace_s = 0.0
        """Seconds that each ack takes after the action of `at_call`: a late signal must still find the run active."""

    def start(self) -> subprocess.Popen[bytes]:
        return self.spawn(command=["-c", UPLOADS_BESIDE]) if self.uploads_beside else self.spawn()

    def at_call(self, wanted: Callable[[str], bool], then: Callable[[], None]) -> threading.Event:
        """Call `then` once, before the answer to the trainer's first call for which `wanted(method)` holds. The
        returned event is set just before `then` is called."""
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
        """Wait until a process ends; return its exit code."""
        return process.wait(DEADLINE_S)

    def digests(self) -> dict[PolicyVersion, str]:
        """Return the digest of the parameters of every published version."""
        return {version: self.versions.manifest(version).params_sha256 for version in self.versions.versions()}

    def close(self) -> None:
        """Kill the trainers that still run, and stop the server."""
        super().close()
        self.server.close()


def workers_of(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """Return the processes that torchrun has started: rank -> process id."""
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
