"""A trainer process that is killed at any moment and started again ends with the weights of one that never was, to
the byte: each version that both publish has the same digest."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.versions import PolicyVersion
from tests.support.trainer_process import TrainerProcesses
from tests.support.trainer_values import make_repeating_batch

NUM_STEPS = 12
NUM_KILLS = 3
MAX_CALLS_BEFORE_KILL = 24
"""A trainer makes about so many calls until it is killed: some die in the start, some after many steps."""
MAX_DELAY_S = 0.1


INTERVALS = {"sync_interval": 1, "checkpoint_interval": 1, "keep_versions": 2 * NUM_STEPS}
RATE = {"kind": "linear", "value": 1e-2, "steps": NUM_STEPS}
SECTIONS: dict[str, dict[str, Any]] = {
    "trainer": {**INTERVALS, "num_steps": NUM_STEPS, "shuffle_rewards": True, "learning_rate": RATE, "export": False},
    "objective": {"preset": "tba_prime", "reference_reset_steps": 3, "beta": {"value": 0.1}},
    "eval": {"every_steps": 1000},
}


@pytest.fixture
def start_run(tmp_path: Path, model: Path) -> Iterator[Callable[..., TrainerProcesses]]:
    runs: list[TrainerProcesses] = []

    def start(name: str) -> TrainerProcesses:
        (tmp_path / name).mkdir()
        runs.append(TrainerProcesses(tmp_path / name, model, **SECTIONS))
        runs[-1].buffer.batch_of = make_repeating_batch
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def kill_at_a_random_call(run: TrainerProcesses, chance: random.Random, number: signal.Signals) -> None:
    """Start a trainer; at some call of it a clock starts, and when that ends it gets the signal."""
    calls_left = [chance.randrange(1, MAX_CALLS_BEFORE_KILL)]
    killer: list[threading.Timer] = []

    def wanted(method: str) -> bool:
        calls_left[0] -= method != "heartbeat"
        return calls_left[0] <= 0

    def kill() -> None:
        killer.append(threading.Timer(chance.uniform(0, MAX_DELAY_S), process.send_signal, [number]))
        killer[0].start()

    process: subprocess.Popen[bytes] = run.start()
    done = run.at_call(wanted, kill)
    code = run.end_of(process)
    killer[0].join()
    assert done.is_set()
    assert code == (128 + number if number == signal.SIGTERM else -number), run.log(len(run.processes) - 1)


def test_kills_at_random_moments_change_no_bit_of_any_version(start_run: Callable[..., TrainerProcesses]) -> None:
    """The killed one uploads its checkpoints beside training. Both run in processes of the same environment: the number
    of threads that OpenMP has may change the last bit."""
    chance = random.Random(7)
    whole, run = start_run("whole"), start_run("killed")
    run.uploads_beside = True
    run.pace_s = 5 * MAX_DELAY_S  # between the call and the signal hardly a step is made, however fast the machine
    undisturbed = whole.start()
    for trial in range(NUM_KILLS):
        kill_at_a_random_call(run, chance, signal.SIGTERM if trial == 1 else signal.SIGKILL)
        assert run.buffer.state == "running"
    run.buffer.before = lambda method: None
    assert run.end_of(run.start()) == 0, run.log(NUM_KILLS)
    assert run.buffer.state == "done"
    assert whole.end_of(undisturbed) == 0
    expected, found = {version.step: sha for version, sha in whole.digests().items()}, run.digests()
    assert len(set(expected.values())) == NUM_STEPS + 1
    assert PolicyVersion(run.buffer.lineage, NUM_STEPS) in found
    assert len({version.lineage for version in found}) > 2
    assert {str(v): sha for v, sha in found.items()} == {str(v): expected[v.step] for v in found}
