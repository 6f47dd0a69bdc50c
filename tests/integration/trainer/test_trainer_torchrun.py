"""The trainer in two real processes that torchrun started, as `tba run` does it: stopped, its launcher killed, one of
them killed, and finished by a single process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.trainer import train

from tba.config import load_recipe
from tba.service_main import EXIT_ERROR
from tba.store import FileStore, open_store
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_process import DEADLINE_S, TrainerProcesses, workers_of
from tests.support.trainer_values import RecordedBuffer
from tests.support.waits import until

NUM_STEPS = 12
TOLERANCE = 1e-4
"""After several steps of Adam, whose update of a small gradient depends on its last digits."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrainerProcesses]:
    model = make_tiny_model(tmp_path / "model", hidden_size=32)
    run = TrainerProcesses(
        tmp_path,
        model,
        trainer={
            "num_steps": NUM_STEPS,
            "checkpoint_interval": 2,
            "collective_timeout_s": 100.0,
            "learning_rate": {"value": 1e-3},
        },
        eval={"every_steps": 1000},
    )
    yield run
    run.close()


def train_here(run: TrainerProcesses, buffer: RecordedBuffer, store: Any) -> None:
    arguments: dict[str, Any] = {"buffer": buffer, "store": store, "stop": threading.Event()}
    train(load_recipe(run.recipe_path, environ={}), **arguments)


def last_tensors(store: Any, lineage: int, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(WeightVersions(store, "demo").download_tensors(PolicyVersion(lineage, NUM_STEPS), folder).paths[0])


def at_step(run: TrainerProcesses, step: int) -> Callable[[str], bool]:
    return lambda method: method == "ack" and run.buffer.step >= step - 1


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.nightly
def test_processes_that_torchrun_started_stop_die_and_are_continued_by_one(
    run: TrainerProcesses, tmp_path: Path
) -> None:
    run.pace_s = 2.0
    # SIGTERM: the step is finished and saved, nothing is lost
    first = run.start(num_processes=2)
    run.at_call(at_step(run, 3), first.terminate)
    assert run.end_of(first) == 128 + signal.SIGTERM
    stopped = run.buffer.step
    assert run.buffer.checkpoint == (f"1-{stopped}", f"runs/demo/checkpoints/1-{stopped}"), run.log(0)
    assert "Traceback" not in run.log(0)

    # the launcher is killed: its workers, in sessions of their own, end all the same
    second = run.start(num_processes=2)
    workers: dict[int, int] = {}

    def kill_launcher() -> None:
        workers.update(workers_of(second))
        second.kill()
        # the leader waits for the answer to this call meanwhile, so it makes no step before it is gone
        until("both workers are gone", lambda: all(map(is_gone, workers.values())))

    assert run.at_call(at_step(run, stopped + 2), kill_launcher).wait(DEADLINE_S)
    run.end_of(second)
    until("the workers were found and are gone", lambda: workers and all(map(is_gone, workers.values())))
    assert workers.keys() == {0, 1}

    # a follower is killed: the leader says so in one sentence, and writes nothing that is half
    third = run.start(num_processes=2)
    assert run.buffer.step < NUM_STEPS - 3, "too few steps are left to lose a process in"
    run.at_call(at_step(run, run.buffer.step + 2), lambda: os.kill(workers_of(third)[1], signal.SIGKILL))
    # the launcher's own, or that of the leader where both are gone when it looks
    assert run.end_of(third) in (1, EXIT_ERROR)
    assert "error: trainer: process 0 of 2 has lost another process of this trainer" in run.log(2)
    assert "Traceback" not in run.log(2)
    assert run.buffer.state == "running"

    # one process continues from what two have saved, and ends where one ends that did it all
    store = open_store(load_recipe(run.recipe_path, environ={}).store)
    run.buffer.before = lambda method: None
    train_here(run, run.buffer, store)
    assert run.buffer.state == "done"
    whole, whole_store = RecordedBuffer(), FileStore(tmp_path / "whole")
    train_here(run, whole, whole_store)
    found = last_tensors(store, run.buffer.lineage, tmp_path / "found")
    expected = last_tensors(whole_store, 1, tmp_path / "expected")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE)
