"""Learners of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy

from tests.support.trainer_values import make_recipe


def make_learner(folder: Path, **sections: dict[str, Any]) -> Learner:
    """A learner of the model in the folder; `sections` override the recipe."""
    recipe = make_recipe(folder, **sections)
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    return Learner(model, recipe, np.random.default_rng(0))


def move(learner: Learner, *, seed: int = 1) -> Learner:
    """The same learner with theta away from where it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return learner
