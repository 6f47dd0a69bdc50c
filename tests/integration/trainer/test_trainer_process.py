"""The trainer over a real buffer, Redis and store: killed, stopped, fenced, resumed."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_trainer.learner.learner import Learner
from tba_trainer.trainer import train

from tba.api import LedgerEntry, LineageRequest, RunInfo
from tba.clients import BufferClient
from tba.config import load_recipe
from tba.store import FileStore, open_store
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Batch, encode_rollout
from tba_cli.reports.ledger import batch_entries
from tests.support.buffer import SERVICE_PATHS, Stack, make_prompts, make_recipe, start_stack, write_recipe
from tests.support.listeners import listening_ports
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_process import StartedTrainers
from tests.support.trainer_values import make_rollout, recipe_of_buffer
from tests.support.waits import DEADLINE_S, until

NUM_STEPS = 40
ENDLESS = "trainer.num_steps=100000"


class Run(StartedTrainers):
    """A buffer filled with rollouts, and trainer processes."""

    def __init__(self, folder: Path, stack: Stack, model: Path) -> None:
        self.stack, self.client = stack, stack.client
        recipe = recipe_of_buffer(stack.recipe, model, num_steps=NUM_STEPS, sync_interval=4, checkpoint_interval=5)
        super().__init__(folder, write_recipe(folder / "trainer.json", recipe))
        self.versions = WeightVersions(FileStore(folder / "store"), stack.recipe.run.name)
        self.stop = threading.Event()

    def fill(self) -> None:
        rng = np.random.default_rng(0)
        self.client.upload_prompts(make_prompts(8, 4))
        self.client.push(
            [
                encode_rollout(make_rollout(rng, prompt_id=f"train-{i % 8}", run="test", reward=float(rng.integers(2))))
                for i in range(64)
            ]
        )

    def start(self, *sets: str) -> subprocess.Popen[bytes]:
        return self.spawn(*(item for text in sets for item in ("--set", text)))

    def train_here(self, **trainer: Any) -> threading.Thread:
        """The same in a thread of this process, where nothing has to be killed."""
        recipe = load_recipe(self.recipe_path, environ={}, sets=[f"trainer.{k}={v}" for k, v in trainer.items()])
        thread = threading.Thread(
            target=train,
            args=(recipe,),
            kwargs={"buffer": self.stack.client, "store": open_store(recipe.store), "stop": self.stop},
            daemon=True,
        )
        thread.start()
        return thread

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self.processes:
                assert self.processes[-1].poll() is None, self.log(len(self.processes) - 1)
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ledger(self) -> list[LedgerEntry]:
        return batch_entries(self.client.ledger(limit=1000).entries)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[Run]:
    store, tracking = {"url": f"file://{tmp_path / 'store'}"}, {"metrics_path": str(tmp_path / "metrics.jsonl")}
    stack = start_stack(tmp_path, buffer={"batch_deadline_s": 120.0}, store=store, tracking=tracking)
    run = Run(tmp_path, stack, model)
    try:
        run.fill()
        yield run
    finally:
        run.close()
        stack.stop()


def step_of(client: BufferClient) -> int:
    return client.run().step


def is_past_a_checkpoint(info: RunInfo) -> bool:
    return info.checkpoint is not None and info.step > PolicyVersion.parse(info.checkpoint).step


def still(client: BufferClient) -> RunInfo | None:
    """The run, if neither step nor checkpoint change any more."""
    readings = [client.run()]
    for _ in range(3):
        time.sleep(0.1)
        readings.append(client.run())
    return readings[-1] if len({(info.step, info.checkpoint) for info in readings}) == 1 else None


def test_a_run_that_is_killed_and_stopped_has_every_step_once_along_the_active_lineage(run: Run) -> None:
    first = run.start(ENDLESS)
    run.until(lambda: is_past_a_checkpoint(run.client.run()))
    assert listening_ports(first.pid) == [], "a trainer of one process listens on nothing"
    first.kill()
    first.wait()
    killed_at = until("what it had sent has taken effect", lambda: still(run.client))
    assert killed_at is not None
    assert killed_at.checkpoint is not None
    resumed_from = PolicyVersion.parse(killed_at.checkpoint).step
    second = run.start(ENDLESS)
    run.until(lambda: run.client.run().lineage == 2 and step_of(run.client) >= resumed_from + 2)
    second.terminate()
    assert second.wait(timeout=DEADLINE_S) == 143, run.log(1)  # a Job must not count it as done
    stopped = run.client.run()
    assert stopped.state == "running"
    assert stopped.checkpoint == f"2-{stopped.step}"  # SIGTERM lost no step
    num_steps = stopped.step + 8
    third = run.start(f"trainer.num_steps={num_steps}")
    assert third.wait(timeout=DEADLINE_S) == 0, run.log(2)
    done = run.client.run()
    assert done.state == "done"
    assert done.latest_version == f"3-{num_steps}"
    assert done.parents == {1: "0-0", 2: f"1-{resumed_from}", 3: stopped.checkpoint}
    active = [entry for entry in run.ledger() if not entry.abandoned]
    assert [entry.step for entry in active] == list(range(1, num_steps + 1))
    assert run.versions.exists(PolicyVersion(3, num_steps))
    assert "Traceback" not in "".join(run.log(i) for i in range(3))


def test_a_second_trainer_fences_the_first_which_exits_with_code_3(run: Run) -> None:
    process = run.start(ENDLESS)
    run.until(lambda: step_of(run.client) >= 3)
    run.client.new_lineage(LineageRequest(trainer_id="another", parent="0-0"))
    assert process.wait(timeout=DEADLINE_S) == 3
    last_line = run.log(0).strip().splitlines()[-1]
    assert last_line.startswith("error: trainer: ")
    assert "a newer trainer start owns this run" in last_line
    assert all(entry.abandoned for entry in run.ledger())


def test_a_failed_run_continues_from_its_last_checkpoint_in_a_new_lineage(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = Learner.gradients

    def broken(self: Learner, batch: Batch, *, step: int, **kwargs: Any) -> dict[str, float | None]:
        return gradients(self, batch, step=step, **kwargs) | ({"loss": math.nan} if step == 7 else {})

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "gradients", broken)
        patch.setattr(threading, "excepthook", lambda args: None)  # the thread ends with that error
        run.train_here(**{"guards.non_finite.action": "fail"}).join(timeout=DEADLINE_S)
    failed = run.client.run()
    assert (failed.state, failed.step) == ("failed", 7)
    assert failed.state_reason is not None
    assert failed.state_reason.startswith("step 1-7: non_finite: the loss is nan")
    run.train_here().join(timeout=DEADLINE_S)
    done = run.client.run()
    assert (done.state, done.parents) == ("done", {1: "0-0", 2: "1-5"})
    active = [entry for entry in run.ledger() if not entry.abandoned]
    assert [(entry.step, entry.skipped) for entry in active] == [(step, None) for step in range(1, NUM_STEPS + 1)]


def test_a_trainer_that_is_stopped_in_its_final_evaluation_can_be_resumed_to_the_end(run: Run) -> None:
    """No searcher evaluates here, so the evaluation is never done before its deadline."""
    first = run.start("eval.timeout_s=600", "trainer.num_steps=6")
    run.until(lambda: any(wait.name == "final-evaluation" for wait in run.client.run().waits))
    first.terminate()
    assert first.wait(timeout=DEADLINE_S) == 143, run.log(0)
    stopped = run.client.run()
    assert (stopped.state, stopped.checkpoint) == ("running", "1-6")
    second = run.start("trainer.num_steps=6")
    assert second.wait(timeout=DEADLINE_S) == 0, run.log(1)
    done = run.client.run()
    assert (done.state, done.lineage, done.step, done.latest_version) == ("done", 2, 6, "2-6")
    assert "2-6" in {evaluation.version for evaluation in done.evals}
    assert [entry.step for entry in run.ledger()] == list(range(1, 7))


def test_the_buffer_may_be_killed_and_restarted_under_a_training_run(run: Run) -> None:
    thread = run.train_here()
    run.until(lambda: step_of(run.client) >= 3)
    run.stack.buffer.kill()
    run.stack.buffer.start()
    thread.join(timeout=DEADLINE_S)
    assert run.client.run().state == "done"
    assert [entry.step for entry in run.ledger() if not entry.abandoned] == list(range(1, NUM_STEPS + 1))


def test_an_error_is_one_sentence_and_torch_is_not_imported_for_a_bad_recipe(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[run]\nname = "x"\n[model]\npath = "m"\n[data]\ngenerator = "addition"\n[trainer]\nstep = 3\n')
    code = (
        "import sys; from tba.service_main import service_main; from tba_trainer.__main__ import run; "
        f"code = service_main('trainer', run, ['--config', {str(path)!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS))}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "unknown key 'trainer.step'" in done.stderr
    assert "Traceback" not in done.stderr


# ---- A trainer that gets SIGTERM before it has anything to keep -----------------------------------------------------


def test_the_processes_of_a_trainer_that_waits_for_the_buffer_end_at_once_with_143(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_buffer:
        silent_buffer.settimeout(DEADLINE_S)
        recipe = make_recipe(
            model={"path": str(make_tiny_model(tmp_path / "model", hidden_size=32))},
            buffer={"url": f"http://127.0.0.1:{silent_buffer.getsockname()[1]}"},
            store={"url": f"file://{tmp_path / 'store'}"},
        )
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        log_path = tmp_path / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tba_trainer.distributed.launch", "2"),
                    *("--config", str(write_recipe(tmp_path / "recipe.json", recipe))),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(scratch),
                },
                stdout=log,
                stderr=log,
            )
        try:
            connection, _ = silent_buffer.accept()  # the leader has its model and asks for the run
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
            connection.close()
        finally:
            process.kill()
            process.wait()
    said = log_path.read_text()
    assert "Traceback" not in said
    assert "trainer: SIGTERM while it starts: it ends\n" in said
