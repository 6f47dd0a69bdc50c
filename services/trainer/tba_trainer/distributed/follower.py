"""Ranks 1 and up: they build the same learner with their shards, and follow the commands of rank 0 (leader.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.logs import get_logger
from tba.temporary_folders import temporary_folder
from tba.versions import PolicyVersion
from tba.wire import decode_batch
from tba_trainer.distributed.checkpoints import FollowerCheckpoints
from tba_trainer.distributed.leader import BUILD, build_follower
from tba_trainer.distributed.process_group import BroadcastTensors, Team
from tba_trainer.distributed.shares import KeptShares
from tba_trainer.learner.learner import TrainerState
from tba_trainer.learner.schedules import StepValues

Arguments = dict[str, Any]
log = get_logger("follower")


def follow(recipe: Recipe, team: Team) -> None:
    """Follow the leader's commands until it sends the end.

    Raises:
        TeamError: the leader or another process is gone.
        TbaError: this process cannot do its part; for example, it does not find the model.
    """
    log.info("follows", rank=team.rank, num_ranks=team.num_ranks, device=team.device)
    commands: dict[str, Callable[[Arguments], object]] = {}
    with temporary_folder("tba-trainer-") as folder:
        assert team.beside is not None
        shares = KeptShares(recipe, team.beside, deadline_s=recipe.trainer.collective_timeout_s)
        shares.start()
        for command, arguments in team.commands():
            if command == BUILD:
                commands = {}  # a rollback builds everything again: release the old model before there is a new one
                shares.clear()
                commands = _commands(recipe, team, shares, folder)
            else:
                commands[command](arguments)
        shares.join()
    log.info("followed_to_the_end", rank=team.rank)


def _commands(recipe: Recipe, team: Team, shares: KeptShares, folder: Path) -> dict[str, Callable[[Arguments], object]]:
    learner, snapshots = build_follower(recipe, team, folder=folder)
    checkpoints = FollowerCheckpoints(recipe, learner, team, folder=folder)

    def snapshot(*, version: str, share: str) -> None:
        shares.make_room()
        shares.keep(share, snapshots.follow(PolicyVersion.parse(version)))

    return {
        "gradients": lambda a: learner.gradients(
            decode_batch(a["batch"]),
            step=a["step"],
            policy_ages=a["policy_ages"],
            values=_values(a),
            usual_grad_norm=a["usual_grad_norm"],
        ),
        "apply": lambda a: learner.apply(step=a["step"], lineage=a["lineage"], values=_values(a)),
        "skip": lambda a: learner.skip(step=a["step"], lineage=a["lineage"]),
        "discard": lambda _a: learner.discard(),
        "remember": lambda a: learner.remember(
            PolicyVersion.parse(a["version"]), same_as=a["same_as"] and PolicyVersion.parse(a["same_as"])
        ),
        "load_weights": lambda a: learner.load_weights(BroadcastTensors(team, a["names"]), what=a["what"]),
        "restore": lambda a: checkpoints.restore(TrainerState.model_validate_json(a["state"])),
        "write_part": lambda a: checkpoints.write(**a),
        "fetch_part": lambda a: checkpoints.fetch(**a),
        "reply": lambda a: checkpoints.reply(**a),
        "drop_part": lambda a: checkpoints.drop(**a),
        "snapshot": lambda a: snapshot(**a),
    }


def _values(arguments: Arguments) -> StepValues | None:
    return None if arguments["values"] is None else StepValues(**arguments["values"])
