"""Teams of trainer processes, and how they are launched."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter, write_model_files
from tba_trainer.distributed import follower, leader
from tba_trainer.distributed.launch import main
from tba_trainer.distributed.leader import LeaderLearner, LeaderWeightSnapshotWriter, encode_drawn_batch
from tba_trainer.distributed.process_group import BroadcastTensors, Team
from tba_trainer.learner.learner import Learner

from tba.errors import StoreUnavailableError
from tba.wire import decode_batch
from tests.support.trainer_values import make_batch

# ---- A team's leader and followers know the same commands, and what passes through files stays bounded in memory ----


def public_methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, FunctionType) and not name.startswith("_")}


def test_every_method_that_changes_or_gathers_theta_is_led() -> None:
    """A method that only rank 0 called would wait for the others for ever."""
    assert public_methods(LeaderLearner) == public_methods(Learner)
    assert public_methods(LeaderWeightSnapshotWriter) == public_methods(WeightSnapshotWriter) - {"follow"}


def test_every_command_of_the_leader_is_one_of_the_followers() -> None:
    led = set(re.findall(r"\.lead\(\"(\w+)\"", inspect.getsource(leader)))
    followed = set(re.findall(r"^ {8}\"(\w+)\":", inspect.getsource(follower), re.MULTILINE))
    assert led == followed
    assert len(led) == len(public_methods(Learner)) + 1
    assert ".lead(BUILD)" in inspect.getsource(leader)


def test_a_batch_reaches_the_followers_as_it_is() -> None:
    batch = make_batch(3)
    found = decode_batch(encode_drawn_batch(batch))
    assert [r.rollout_id for r in found.rollouts] == [r.rollout_id for r in batch.rollouts]
    for ours, theirs in zip(batch.rollouts, found.rollouts, strict=True):
        assert ours.sampler_logprobs.tobytes() == theirs.sampler_logprobs.tobytes()
        assert ours.response_tokens.tobytes() == theirs.response_tokens.tobytes()
        assert (ours.reward, ours.prompt_id) == (theirs.reward, theirs.prompt_id)


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

    paths = write_model_files(gathered(), tmp_path, max_bytes=max_bytes)
    assert len(paths) == -(-num_tensors * tensor_bytes // max_bytes)
    assert most[0] <= max_bytes // tensor_bytes + 2  # a file, the tensor that did not fit, and the one that comes next


# ---- The launcher of a trainer of several processes -----------------------------------------------------------------


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
