"""Teams of trainer processes, and how they are launched."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import msgspec.msgpack
import pytest
import torch
from tba_trainer import trainer
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter, write_tensor_files
from tba_trainer.distributed import checkpoints, follower, leader, shares
from tba_trainer.distributed.jobs import Job, give_reply
from tba_trainer.distributed.launch import LAUNCHER_VARIABLE, launch, main
from tba_trainer.distributed.leader import LeaderLearner, LeaderWeightSnapshotWriter
from tba_trainer.distributed.process_group import BroadcastTensors, Team, _end_with_launcher
from tba_trainer.learner.learner import Learner
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from tba.errors import StoreUnavailableError
from tests.support.trainer_values import make_recipe


def public_methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, FunctionType) and not name.startswith("_")}


def test_every_method_that_changes_or_gathers_theta_is_led() -> None:
    """A method that only rank 0 called would wait for the others for ever."""
    assert public_methods(LeaderLearner) == public_methods(Learner) - {"capture", "layout"}  # these exchange nothing
    assert public_methods(LeaderWeightSnapshotWriter) == public_methods(WeightSnapshotWriter) - {"follow"}


def test_every_command_of_the_leader_is_one_of_the_followers() -> None:
    source = inspect.getsource(leader) + inspect.getsource(checkpoints)
    led = set(re.findall(r"\.(?:lead|collect)\(\"(\w+)\"", source))
    followed = set(re.findall(r"^ {8}\"(\w+)\":", inspect.getsource(follower), re.MULTILINE))
    assert led == followed
    assert len(led) == len(public_methods(LeaderLearner)) + 1 + 4  # a snapshot; the commands of checkpoints
    assert ".lead(BUILD)" in inspect.getsource(leader)
    source = inspect.getsource(shares)
    asked = set(re.findall(r"\.(?:lead|collect)\(\"(\w+)\"", source))
    assert asked == set(re.findall(r"^ {12}\"(\w+)\":", source, re.MULTILINE))
    assert len(asked) == 4


def test_a_team_of_one_exchanges_nothing() -> None:
    with Team.alone() as team:
        team.start_beats(on_loss=lambda: pytest.fail("nobody can be lost"))
        assert (team.is_leader, team.mesh, team.ranks().num_ranks) == (True, None, 1)
        with team.lead("anything"):
            pass
        with pytest.raises(StoreUnavailableError), team.lead("anything"):
            raise StoreUnavailableError("the leader's own")
        assert list(BroadcastTensors(team, ["a", "b"])) == ["a", "b"]


def test_of_a_gathered_model_one_file_and_one_tensor_are_in_memory_at_once(tmp_path: Path) -> None:
    num_tensors, tensor_bytes, max_bytes = 40, 4000, 12_000
    alive: set[int] = set()
    most = [0]

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(num_tensors):
            tensor = torch.zeros(tensor_bytes // 4)
            alive.add(i)
            weakref.finalize(tensor, alive.discard, i)
            most[0] = max(most[0], len(alive))
            yield f"t{i}", tensor

    paths = list(write_tensor_files(gathered(), tmp_path, stem="model", max_bytes=max_bytes))
    assert len(paths) == -(-num_tensors * tensor_bytes // max_bytes)
    assert most[0] <= max_bytes // tensor_bytes + 2  # a file, the tensor that did not fit, and the one that comes next


def failure_of(code: int, time_s: int = 2) -> ProcessFailure:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="none")
    failure.timestamp = time_s
    return failure


def test_a_wrong_recipe_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[run]\nname = 5\n")
    assert main(["2", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: trainer: {path}: ")
    assert err.count("\n") == 1


def test_several_machines_must_know_where_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["2", "--nodes", "2", "--config", "recipe.toml"])
    assert caught.value.code == 2
    assert "--nodes and --rendezvous go together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (RendezvousTimeoutError("too late"), 2, "of 2 machines did not meet at there:1 within 8 s "),
        (DistNetworkError("connection reset"), 2, "or lost each other (connection reset); start all of them again"),
        (ChildFailedError("x", {3: failure_of(-signal.SIGKILL)}), 1, "process 3 was ended by SIGKILL. Where nobody"),
        (ChildFailedError("x", {3: failure_of(143), 1: failure_of(75, 1)}), 75, ""),
    ],
)
def test_the_end_of_a_launcher_is_one_sentence_and_a_code(
    error: Exception, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launchers = []

    def fail(args: argparse.Namespace) -> None:
        launchers.append(os.environ[LAUNCHER_VARIABLE])
        assert args.rdzv_conf == "join_timeout=8,read_timeout=8"
        raise error

    monkeypatch.setenv(LAUNCHER_VARIABLE, "1")  # restored afterwards
    monkeypatch.setattr("torch.distributed.run.run", fail)
    assert launch(1, [], stop_timeout_s=1.0, collective_timeout_s=7.5, num_nodes=2, rendezvous="there:1") == code
    assert launchers == [str(os.getpid())]
    err = capsys.readouterr().err
    assert err.count("\n") == (sentence != "")
    assert sentence in err


def test_a_process_whose_launcher_died_before_it_looked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "999999999")
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        _end_with_launcher()
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_deterministic_trainer_refuses_random_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU kernels add in a random order is torch's knowledge; here it is only asked before the model is built."""
    seen = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # restored after the test
    monkeypatch.setattr(trainer, "train", lambda *_, **__: seen.append(torch.are_deterministic_algorithms_enabled()))
    try:
        for wanted in (False, True):
            trainer.run_trainer(make_recipe(tmp_path, trainer={"deterministic": wanted}))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.parametrize(("end", "code"), [("done", 0), ("stopped", 143)])
def test_a_stop_is_not_the_end_of_a_job(end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "train", lambda *_, **__: end)
    assert trainer.run_trainer(make_recipe(tmp_path)) == code


def test_a_follower_says_what_came_of_a_job_that_a_new_lineage_forgets_meanwhile() -> None:
    class Forgotten(dict[str, Job]):
        """Another thread clears it when a job has just been looked up."""

        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            self.clear()
            return found

    said: list[bytes] = []
    team = cast(Team, SimpleNamespace(gather=said.append))
    job = Job("share")
    job.reply = {"size_bytes": 3}
    give_reply(team, Forgotten(share=job), "share")
    jobs = {"share": job, "busy": Job("busy")}
    for name in ("share", "share", "busy"):  # once
        give_reply(team, jobs, name)
    assert (said, list(jobs)) == ([*[msgspec.msgpack.encode(job.reply)] * 2, b"", b""], ["busy"])
