"""Theta, its learner and its snapshots, as one process or as several that share them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tba.config import Recipe
from tba_trainer.learner import Learner, trainer_rng
from tba_trainer.model import empty_policy, load_policy
from tba_trainer.parallel.leader import LeadingLearner, LeadingSnapshots
from tba_trainer.parallel.sharding import shard
from tba_trainer.parallel.team import Team
from tba_trainer.snapshots import Snapshots

BUILD = "build"
"""The first command of a leader."""


def build(recipe: Recipe, team: Team, *, folder: Path) -> tuple[Any, Learner, Snapshots]:
    """The model, which is the starting model, and what trains and publishes it (leader only).

    Args:
        folder: for the files of snapshots.

    Raises:
        ConfigError: there is no model at model.path, or the device cannot be used.
        TeamError: a follower is gone.
    """
    torch.manual_seed(recipe.run.seed)
    checkpointing = recipe.trainer.gradient_checkpointing
    mesh = team.mesh
    if mesh is None:
        model = load_policy(recipe.model, device=team.device, gradient_checkpointing=checkpointing)
        return model, Learner(model, recipe, trainer_rng(recipe)), Snapshots(model, recipe, folder=folder)
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=checkpointing)
    with team.lead(BUILD):
        shard(model, mesh)
        return model, LeadingLearner(model, recipe, team), LeadingSnapshots(model, recipe, team, folder=folder)


def build_follower(recipe: Recipe, team: Team) -> tuple[Learner, Snapshots]:
    """The same in a process that has a shard of it, sent by the leader.

    Raises:
        ConfigError: there is no model at model.path here.
    """
    torch.manual_seed(recipe.run.seed)
    model = empty_policy(recipe.model, gradient_checkpointing=recipe.trainer.gradient_checkpointing)
    assert team.mesh is not None
    shard(model, team.mesh)
    learner = Learner(model, recipe, trainer_rng(recipe), ranks=team.ranks())
    return learner, Snapshots(model, recipe, folder=Path(tempfile.gettempdir()))  # nothing is written there
