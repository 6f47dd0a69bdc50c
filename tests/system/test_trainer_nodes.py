"""A trainer on two machines, here two launchers on loopback that meet at a port: SIGTERM, resume, the end; a machine
that dies in mid-step, one that comes back late, one that never comes, and one that freezes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_process import free_port
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_process import DEADLINE_S, TrainerProcesses, workers_of

NUM_STEPS = 20
CHECKPOINT_INTERVAL = 6
ENDS_WITHIN_S = 120.0
"""Most seconds from the death of a machine to the end of the other, far below what other waits would take (600 s); 3.7
to 6.5 s were measured (2026-11-26), and 56 s at a load of 15 to 40 on two cores."""


def make_run(folder: Path, *, collective_timeout_s: float = 60.0) -> TrainerProcesses:
    folder.mkdir()
    trainer = {"num_steps": NUM_STEPS, "checkpoint_interval": CHECKPOINT_INTERVAL, "export": False}
    trainer["collective_timeout_s"] = collective_timeout_s
    model = make_tiny_model(folder / "model", hidden_size=32)
    return TrainerProcesses(folder, model, trainer=trainer, eval={"every_steps": 1000})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrainerProcesses]:
    found = make_run(tmp_path / "run")
    yield found
    found.close()


def start_node(run: TrainerProcesses, number: int, where: str) -> subprocess.Popen[bytes]:
    command = ["-m", "tba_trainer.distributed.launch", "1", "--nodes", "2", "--rendezvous", where]
    with (run.folder / f"node-{number}.log").open("wb") as log:
        node = subprocess.Popen(
            [sys.executable, *command, "--config", str(run.recipe_path)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=log,
            stderr=log,
        )
    run.processes.append(node)
    return node


def start_nodes(run: TrainerProcesses, *, late_s: float = 0.0) -> list[subprocess.Popen[bytes]]:
    where = f"localhost:{free_port()}"
    first = start_node(run, 0, where)
    time.sleep(late_s)
    return [first, start_node(run, 1, where)]


def kill_node(node: subprocess.Popen[bytes]) -> None:
    for pid in [node.pid, *workers_of(node).values()]:
        os.kill(pid, signal.SIGKILL)


def seconds_to_end(node: subprocess.Popen[bytes]) -> float:
    start_s = time.monotonic()
    node.wait(DEADLINE_S)
    return time.monotonic() - start_s


def logs(run: TrainerProcesses) -> str:
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


@pytest.fixture(scope="module")
def last_digest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = make_run(tmp_path_factory.mktemp("whole") / "run")
    try:
        assert [node.wait(DEADLINE_S) for node in start_nodes(run)] == [0, 0], logs(run)[-3000:]
        yield newest_digest(run)
    finally:
        run.close()


def newest_digest(run: TrainerProcesses) -> str:
    version, digest = max(run.digests().items(), key=lambda item: item[0].step)
    assert version.step == NUM_STEPS
    return digest


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("launcher_alone", [False, True])
def test_a_machine_dies_in_mid_step_and_both_continue_exactly_although_one_is_late(
    run: TrainerProcesses, last_digest: str, victim: int, launcher_alone: bool
) -> None:
    nodes = start_nodes(run)
    kill = (lambda: nodes[victim].kill()) if launcher_alone else (lambda: kill_node(nodes[victim]))
    # between the gradients and the update of a step: the trainer waits for the answer
    run.at_call(lambda method: method == "ack" and len(run.buffer.acks) == CHECKPOINT_INTERVAL + 2, kill)
    run.pace_s = 1.0
    nodes[victim].wait(DEADLINE_S)
    orphans = workers_of(nodes[victim])
    assert seconds_to_end(nodes[1 - victim]) < ENDS_WITHIN_S
    log = (run.folder / f"node-{1 - victim}.log").read_text()
    assert nodes[1 - victim].returncode == 2, log[-3000:]
    assert "lost another process of this trainer during" in log or "or lost each other" in log
    assert "Traceback" not in log
    assert not orphans
    assert run.buffer.checkpoint is not None
    assert run.buffer.checkpoint[0] == f"1-{CHECKPOINT_INTERVAL}"

    run.pace_s = 0.0
    assert [node.wait(DEADLINE_S) for node in start_nodes(run, late_s=5.0)] == [0, 0], logs(run)[-3000:]
    assert run.buffer.state == "done"
    assert newest_digest(run) == last_digest


def test_a_machine_that_freezes_ends_the_other_at_the_deadline(tmp_path: Path) -> None:
    run, stopped = make_run(tmp_path / "run", collective_timeout_s=20.0), list[int]()
    try:
        nodes = start_nodes(run)

        def freeze() -> None:
            stopped.extend(workers_of(nodes[1]).values())
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)

        frozen = run.at_call(lambda method: method == "ack" and len(run.buffer.acks) == 3, freeze)
        assert frozen.wait(DEADLINE_S)
        assert seconds_to_end(nodes[0]) < 20.0 + ENDS_WITHIN_S
        log = (run.folder / "node-0.log").read_text()
        assert nodes[0].returncode == 2, log[-3000:]
        assert "did not answer within 20 s (trainer.collective_timeout_s)" in log
    finally:
        for pid in stopped:  # it cannot see that its launcher is gone
            os.kill(pid, signal.SIGKILL)
        run.close()


def test_a_machine_that_never_comes_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", collective_timeout_s=5.0)
    try:
        where = f"localhost:{free_port()}"
        node = start_node(run, 0, where)
        assert node.wait(DEADLINE_S) == 2
        log = (run.folder / "node-0.log").read_text()
        assert f"error: trainer: the launchers of 2 machines did not meet at {where} within 5 s" in log
        assert "Traceback" not in log
    finally:
        run.close()
