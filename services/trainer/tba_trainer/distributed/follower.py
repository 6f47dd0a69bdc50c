"""Ranks 1 and up: they build the same learner with their shards, and follow the commands of rank 0 (leader.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")
log = get_logger("follower")
Commands = dict[str, Callable[..., object]]


def follow(recipe: Recipe, team: Team) -> None:
    """Run the leader's commands in this process until the leader ends the team.

    Raises:
        TeamError: the leader or another process is gone.
        TbaError: this process cannot do its part; for example, it does not find the model.
    """
    log.info("follows", rank=team.rank, num_ranks=team.num_ranks, device=team.device)
    commands: Commands = {}
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
                commands[command](**arguments)
        shares.join()
    log.info("followed_to_the_end", rank=team.rank)


def _commands(recipe: Recipe, team: Team, shares: KeptShares, folder: Path) -> Commands:
    learner, snapshots = build_follower(recipe, team, folder=folder)
    checkpoints = FollowerCheckpoints(recipe, learner, team, folder=folder)

    def snapshot(*, version: dict[str, int], share: str) -> None:
        shares.make_room()
        shares.keep(share, snapshots.follow(PolicyVersion(**version)))

    return {
        "gradients": lambda batch, values, **others: learner.gradients(
            decode_batch(batch), values=_read(StepValues, values), **others
        ),
        "apply": lambda values, **others: learner.apply(values=_read(StepValues, values), **others),
        "skip": learner.skip,
        "discard": learner.discard,
        "remember": lambda version, same_as: learner.remember(
            PolicyVersion(**version), same_as=_read(PolicyVersion, same_as)
        ),
        "load_weights": lambda names, what: learner.load_weights(BroadcastTensors(team, names), what=what),
        "restore": lambda state: checkpoints.restore(TrainerState.model_validate_json(state)),
        "write_part": checkpoints.write,
        "fetch_part": checkpoints.fetch,
        "reply": checkpoints.reply,
        "drop_part": checkpoints.drop,
        "snapshot": snapshot,
    }


def _read(kind: Callable[..., T], fields: dict[str, Any] | None) -> T | None:
    """Return a dataclass that the leader has sent, or None."""
    return None if fields is None else kind(**fields)
