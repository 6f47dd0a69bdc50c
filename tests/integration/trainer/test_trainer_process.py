"""The trainer over a real buffer, Redis and store: fenced, with a buffer that is killed; how a process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_trainer.trainer import train

from tba.api import LedgerEntry, LineageRequest
from tba.config import load_recipe
from tba.store import open_store
from tba.wire import encode_rollout
from tba_cli.reports.ledger import batch_entries
from tests.support.buffer import Stack, make_prompts, make_recipe, start_stack, write_recipe
from tests.support.listeners import listening_ports
from tests.support.trainer_process import StartedTrainers
from tests.support.trainer_values import make_rollout, recipe_of_buffer
from tests.support.waits import DEADLINE_S, until

NUM_STEPS = 40


class Run(StartedTrainers):
    """A buffer filled with rollouts, and the recipe of its trainers."""

    def __init__(self, folder: Path, stack: Stack, model: Path) -> None:
        self.stack, self.client, rng = stack, stack.client, np.random.default_rng(0)
        recipe = recipe_of_buffer(stack.recipe, model, num_steps=NUM_STEPS, sync_interval=4, checkpoint_interval=5)
        super().__init__(folder, write_recipe(folder / "trainer.json", recipe))
        self.client.upload_prompts(make_prompts(8, 4))
        rollouts = [make_rollout(rng, prompt_id=f"train-{i % 8}", run="test", reward=float(i % 3)) for i in range(64)]
        self.client.push([encode_rollout(rollout) for rollout in rollouts])

    def is_at(self, step: int) -> bool:
        assert all(process.poll() is None for process in self.processes), self.log(0)
        return self.client.run().step >= step

    def ledger(self) -> list[LedgerEntry]:
        return batch_entries(self.client.ledger(limit=1000).entries)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[Run]:
    store, tracking = {"url": f"file://{tmp_path / 'store'}"}, {"metrics_path": str(tmp_path / "metrics.jsonl")}
    stack = start_stack(tmp_path, buffer={"batch_deadline_s": 120.0}, store=store, tracking=tracking)
    run = Run(tmp_path, stack, model)
    yield run
    run.close()
    stack.stop()


def test_a_second_trainer_fences_the_first_which_exits_with_code_3(run: Run) -> None:
    process = run.spawn("--set", "trainer.num_steps=100000")
    until("some steps", lambda: run.is_at(3))
    assert listening_ports(process.pid) == [], "a trainer of one process listens on nothing"
    run.client.new_lineage(LineageRequest(trainer_id="another", parent="0-0"))
    assert process.wait(timeout=DEADLINE_S) == 3
    last_line = run.log(0).strip().splitlines()[-1]
    assert last_line.startswith("error: trainer: ")
    assert "a newer trainer start owns this run" in last_line
    assert all(entry.abandoned for entry in run.ledger())


def test_the_buffer_may_be_killed_and_restarted_under_a_training_run(run: Run) -> None:
    recipe = load_recipe(run.recipe_path, environ={})
    services: dict[str, Any] = {"buffer": run.client, "store": open_store(recipe.store), "stop": threading.Event()}
    thread = threading.Thread(target=train, args=(recipe,), kwargs=services, daemon=True)
    thread.start()
    until("some steps", lambda: run.is_at(3))
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "unknown key 'trainer.step'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_processes_of_a_trainer_that_waits_for_the_buffer_end_at_once_with_143(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_buffer:
        silent_buffer.settimeout(DEADLINE_S)
        path, buffer = {"path": str(model)}, {"url": f"http://127.0.0.1:{silent_buffer.getsockname()[1]}"}
        recipe = make_recipe(model=path, buffer=buffer, store={"url": f"file://{tmp_path / 'store'}"})
        (scratch := tmp_path / "scratch").mkdir()
        config, environ = write_recipe(tmp_path / "recipe.json", recipe), {**os.environ, "TMPDIR": str(scratch)}
        command = [sys.executable, "-m", "tba_trainer.distributed.launch", "2", "--config", str(config)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            connection, _ = silent_buffer.accept()  # the leader has its model and asks for the run
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
            connection.close()
        finally:
            process.kill()
            process.wait()
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said
    assert "trainer: SIGTERM while it starts: it ends\n" in said
