"""Whole runs in real processes: a tiny recipe, `tba run` as a person starts it, and ways to inspect the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tba.api import LedgerEntry, RunInfo
from tba.clients import BufferClient
from tba.config import Schedule
from tba.store import FileStore
from tba.tokens import role_token
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Rollout, decode_rollout
from tba_cli.reports.ledger import batch_entries, ledger_lines
from tba_cli.run_folder import RunFolder
from tests.support.redis_process import RedisProcess, free_port
from tests.support.waits import DEADLINE_S, until

RUN = "tiny"
ENDLESS = 1_000_000
"""`trainer.num_steps` of runs that a test ends itself."""
FALLING = Schedule(kind="linear", value=0.4, final=0.2, steps=ENDLESS)
"""A beta that changes at every step of a run of any length."""
SET_FALLING_BETA = f'beta={{kind="linear", value={FALLING.value}, final={FALLING.final}, steps={FALLING.steps}}}'
"""Argument of `tba set` that sets beta to FALLING."""
NUM_STILL = 4
"""After this many equal readings, all messages that a frozen process had sent have taken effect."""
T = TypeVar("T")


def tiny_sections(model: Path, /, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe for a few seconds of training; `sections` override single values."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": RUN},
        "model": {"path": str(model)},
        "data": {"generator": "addition", "num_train": 64, "num_heldout": 16},
        "buffer": {"port": 0},
        "reward": {"port": 0},
        "sampling": {
            "prompts_per_batch": 4,
            "group_size": 4,
            "rollouts_per_visit": 4,
            "min_size_to_sample": 16,
            "samples_per_insert": 1.0,
            "samples_per_insert_error": 64,
        },
        "searcher": {"num_searchers": 1, "num_slots": 8, "max_prompt_tokens": 8, "max_response_tokens": 5},
        "trainer": {"num_steps": 20, "sync_interval": 2, "checkpoint_interval": 5, "keep_versions": 10_000},
        "eval": {"every_steps": ENDLESS, "num_prompts": 8, "num_prompts_final": 16},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return document


@dataclass
class Started:
    """One `tba run` that was started and may still run."""

    process: subprocess.Popen[bytes]
    output: Path
    """File with stdout; stderr is in the same name with .err."""

    @property
    def out(self) -> str:
        return self.output.read_text()

    @property
    def err(self) -> str:
        return self.output.with_suffix(".err").read_text()

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"`tba run` did not end; it wrote:\n{self.out[-3000:]}\n{self.err[-3000:]}") from None


@dataclass
class Place:
    """A folder with a recipe, in which `tba` is run."""

    path: Path
    recipe: dict[str, dict[str, Any]]
    environ: dict[str, str] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        # a port that the system chooses may be given to another process before the service listens
        for name in ("buffer", "reward"):
            section = self.recipe.get(name, {})
            if section.get("port") == 0:
                section["port"] = free_port()
        (self.path / "recipe.json").write_text(json.dumps(self.recipe))

    @property
    def folder(self) -> Path:
        return self.path / "runs" / self.recipe["run"]["name"]

    def start(self, *words: str) -> Started:
        output = self.path / f"start-{len(self.started)}.out"
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                self._command("run", "recipe.json", *words),
                cwd=self.path,
                env=os.environ | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(Started(process, output))
        return self.started[-1]

    def finish(self, *words: str) -> Place:
        """Run `tba run` and assert that it ends with exit code 0 and an empty stderr."""
        started = self.start(*words)
        assert started.wait() == 0, started.err + started.out
        assert started.err == ""
        return self

    def tba(self, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(*words),
            input=typed,
            cwd=self.path,
            env=os.environ | self.environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def control(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a `tba` command on the run in this folder."""
        return self.tba(*words, "--run-dir", str(self.folder))

    def client(self) -> BufferClient:
        """Return a client of the running run's buffer, as operator."""
        endpoints = self.endpoints()
        return BufferClient(endpoints["buffer_url"], token=role_token(endpoints["tokens_file"], "operator"), retry_s=20)

    def redis_url(self) -> str:
        """Return the URL of the running run's Redis, with its password."""
        password = RunFolder(self.folder).redis_password_path.read_text().strip()
        return self.endpoints()["redis_url"].replace("://", f"://:{password}@")

    def endpoints(self) -> dict[str, str]:
        """Wait for endpoints.json and return it."""
        path = self.folder / "endpoints.json"
        until("endpoints.json", lambda: path.exists() or not self._is_going())
        assert path.exists(), f"`tba run` ended: {self.started[-1].err}\n{self.started[-1].out}"
        return json.loads(path.read_text())

    def until(self, what: str, condition: Callable[[RunInfo], Any]) -> RunInfo:
        """Poll the run until `condition` holds and return it; fail as soon as `tba run` has ended."""
        client = self.client()

        def holds() -> RunInfo | None:
            assert self._is_going(), f"`tba run` ended: {self.started[-1].err}\n{self.started[-1].out}"
            info = client.run()
            return info if condition(info) else None

        try:
            info = until(what, holds)
        finally:
            client.close()
        assert info is not None
        return info

    def pid(self, child: str) -> int:
        """Wait until a child (`trainer`, `buffer`, `searcher-0`, ...) has one process; return its id."""
        # one at a time: a process that has just been forked has the command line of its parent for a moment
        return until(f"one process {child}", lambda: sum(found) if len(found := self._pids(child)) == 1 else 0)

    def pids(self) -> list[int]:
        """Return the ids of all processes with this run folder in their command line, or as working folder (Redis)."""
        found, name = [], str(self.folder)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if name in (entry / "cmdline").read_text() or os.readlink(entry / "cwd").startswith(name):
                    found.append(int(entry.name))
        return found

    def log(self, child: str) -> str:
        return (self.folder / "logs" / f"{child}.log").read_text()

    def summary(self, run: str | None = None) -> dict[str, Any]:
        folder = self.folder if run is None else self.path / "runs" / run
        return json.loads((folder / "summary.json").read_text())

    def versions(self, run: str = RUN) -> WeightVersions:
        """Return the published versions in the store folder of a run."""
        return WeightVersions(FileStore(self.path / "runs" / run / "store"), run)

    def tensors(self, version: str, path: Path, run: str = RUN) -> dict[str, Any]:
        """Download a version into a folder below `path`; return its tensors by name."""
        from safetensors.torch import load_file

        return load_file(
            self.versions(run).download_tensors(PolicyVersion.parse(version), path / f"{run}-{version}").paths[0]
        )

    def rollouts(self, run: str = RUN) -> dict[bytes, bytes]:
        """Return the rollouts of an ended run: id -> payload."""
        with self.redis_of_ended_run(run) as redis:
            return stored_rollouts(redis.url, run)

    def ledger(self) -> list[LedgerEntry]:
        """Return the batches in the ledger of a finished run, from its history.json."""
        document = json.loads((self.folder / "history.json").read_text())
        return [LedgerEntry.model_validate(line) for line in document["ledger"] if line["kind"] == "batch"]

    @contextmanager
    def redis_of_ended_run(self, run: str = RUN) -> Iterator[RedisProcess]:
        """Start Redis on the append-only file that a run left."""
        redis = RedisProcess(folder=self.path / "runs" / run / "redis", port=free_port())
        redis.start()
        try:
            yield redis
        finally:
            redis.stop()

    def close(self) -> None:
        """Kill `tba run` processes that a failed test left running; their guard ends the children."""
        for started in self.started:
            with contextlib.suppress(ProcessLookupError):
                started.process.kill()
            started.process.wait()

    def _is_going(self) -> bool:
        return self.started[-1].process.poll() is None

    def _pids(self, child: str) -> list[int]:
        kind, _, number = child.partition("-")
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
                if f"tba_{kind}" in words and (not number or f"TBA_SEARCHER_ID={child}" in environ):
                    found.append(pid)
        return found

    @staticmethod
    def _command(*words: str) -> list[str]:
        return [sys.executable, "-m", "tba_cli.main", *words]


def freeze_when(
    pid: int, what: str, client: BufferClient, condition: Callable[[], T], *, same: Callable[[T], object]
) -> T:
    """SIGSTOP a process at a moment when `condition` holds, leave it stopped, and return the condition's value.

    Args:
        client: of the buffer. It is asked between readings, so that the buffer has handled all earlier messages.
        same: returns the part of the value that must stay equal for `NUM_STILL` readings. Messages that the process
            sent before it stopped have then taken effect.
    """

    def stopped_in_time() -> T:
        os.kill(pid, signal.SIGSTOP)
        readings = [condition()]
        while len(readings) < NUM_STILL or any(same(value) != same(readings[-1]) for value in readings[-NUM_STILL:]):
            time.sleep(0.1)
            client.run()
            readings.append(condition())
        if not readings[-1]:
            os.kill(pid, signal.SIGCONT)
        return readings[-1]

    return until(what, stopped_in_time)


def stands_at(info: RunInfo | None) -> object:
    """Return lineage, step, checkpoint and newest version of a run; for `freeze_when`."""
    return info and (info.lineage, info.step, info.checkpoint, info.latest_version)


def searchers_at_rest(info: RunInfo) -> bool:
    """Return whether, in a paused run, every searcher has no work left and waits for the end of the pause."""
    held = ("active_slots", "waiting_requests", "queued_rollouts", "unpushed")
    return all(
        item.wait is not None and item.wait.name == "run-paused" and not any(item.gauges[name] for name in held)
        for item in info.components
        if item.kind == "searcher"
    )


def trainer_at_rest(info: RunInfo) -> bool:
    """Return whether, in a paused run, the trainer waits for a batch, so that no step is in progress."""
    return any((wait.kind, wait.name) == ("trainer", "run-paused") for wait in info.waits)


def stored_rollouts(redis_url: str, run: str = RUN) -> dict[bytes, bytes]:
    """Return the rollouts in Redis: id -> payload."""
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        return client.hgetall(f"tba:{run}:payloads")  # pyright: ignore[reportReturnType]


def decode_all(payloads: dict[bytes, bytes]) -> list[Rollout]:
    return [decode_rollout(payload) for payload in payloads.values()]


def open_leases(redis_url: str, searcher_id: str, run: str = RUN) -> dict[str, dict[str, Any]]:
    """Return the leases of one searcher in Redis: lease id -> {k: kind, s: searcher, v: visit}."""
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        raw: Any = client.hgetall(f"tba:{run}:leases")
    leases = {lease_id.decode(): json.loads(text) for lease_id, text in raw.items()}
    return {lease_id: lease for lease_id, lease in leases.items() if lease["s"] == searcher_id}


def falling_beta(entry: LedgerEntry) -> Any:
    """Return the beta that FALLING gives at the entry's step, which differs from that of the step before."""
    return pytest.approx(FALLING.at(entry.step - 1), rel=1e-9)


def whole_ledger(client: BufferClient) -> list[LedgerEntry]:
    return batch_entries(list(ledger_lines(client)))
