"""A trainer on two machines, here two launchers on loopback that meet at a port: SIGTERM, resume, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buffer import SERVICE_PATHS
from tests.support.redis_process import free_port
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_process import DEADLINE_S, TrainerProcesses

NUM_STEPS = 20


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrainerProcesses]:
    """A run of `NUM_STEPS` steps."""
    (tmp_path / "run").mkdir()
    sections = {"num_steps": NUM_STEPS, "checkpoint_interval": 1000, "export": False, "collective_timeout_s": 60}
    model = make_tiny_model(tmp_path, hidden_size=32)
    found = TrainerProcesses(tmp_path / "run", model, trainer=sections, eval={"every_steps": 1000})
    yield found
    found.close()


def start_nodes(run: TrainerProcesses) -> list[subprocess.Popen[bytes]]:
    """Two launchers with a process each, as the chart starts them."""
    where, nodes = f"localhost:{free_port()}", []
    paths = {"PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS)), "OMP_NUM_THREADS": "1"}
    for number in range(2):
        command = ["-m", "tba_trainer.distributed.launch", "1", "--nodes", "2", "--rendezvous", where]
        with (run.folder / f"node-{number}.log").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, *command, "--config", str(run.recipe_path)],
                env={**os.environ, **paths, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=log,
                stderr=log,
            )
        nodes.append(node)
    run.processes += nodes
    return nodes


def logs(run: TrainerProcesses) -> str:
    """Return the logs of both nodes."""
    return "".join((run.folder / f"node-{number}.log").read_text() for number in range(2))


def test_two_nodes_are_stopped_and_continue_to_the_end(run: TrainerProcesses) -> None:
    nodes = start_nodes(run)

    def stop() -> None:
        for node in nodes:
            node.send_signal(signal.SIGTERM)

    stopped = run.at_call(lambda method: method == "ack" and len(run.buffer.acks) >= 3, stop)
    run.pace_s = 1.0  # SIGTERM must not find the run done
    assert [node.wait(DEADLINE_S) for node in nodes] == [143, 143], logs(run)[-3000:]
    assert stopped.is_set()
    assert "Traceback" not in logs(run)
    assert run.buffer.checkpoint is not None
    run.pace_s = 0.0
    assert [node.wait(DEADLINE_S) for node in start_nodes(run)] == [0, 0], logs(run)[-3000:]
    assert run.buffer.state == "done"
    assert run.buffer.step == NUM_STEPS


def test_several_machines_must_know_where_they_meet(run: TrainerProcesses) -> None:
    command = [sys.executable, "-m", "tba_trainer.distributed.launch", "1", "--nodes", "2"]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SERVICE_PATHS))}
    done = subprocess.run(
        [*command, "--config", str(run.recipe_path)], capture_output=True, text=True, env=paths, check=False
    )
    assert done.returncode == 2
    assert "--nodes and --rendezvous go together" in done.stderr
