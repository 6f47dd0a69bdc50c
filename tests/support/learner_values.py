"""Learners of tiny models, and the part of a checkpoint that is not tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tba_trainer.learner.learner import Learner, TrainerState, encode_torch_rng
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import load_policy

from tba.wire import Batch, Rollout
from tests.support.trainer_values import make_recipe


def make_learner(folder: Path, **sections: dict[str, Any]) -> Learner:
    """Return a learner of the model in the folder; `sections` override the recipe."""
    recipe = make_recipe(folder, **sections)
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    return Learner(model, recipe, np.random.default_rng(0))


def move(learner: Learner, *, seed: int = 1) -> Learner:
    """Add random noise to a learner's parameters; return the learner."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return learner


def gradient(learner: Learner, batch: Batch, ages: list[int] | None = None) -> torch.Tensor:
    """Compute the gradients of a batch; return them as one flat tensor."""
    learner.gradients(batch, step=1, policy_ages=ages or [0] * len(batch.rollouts))
    return torch.cat([p.grad.flatten() for p in learner.model.parameters()])


def token_logprobs(model: Any, rollout: Rollout, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probs [R] of a rollout's response tokens under a model."""
    sequences = pack_sequences([rollout.prompt_tokens], [rollout.response_tokens], "cpu")
    with torch.no_grad():
        return LogprobModel(model, temperature=temperature).token_logprobs(sequences).numpy()


def make_state(version: str, learner: Learner | None = None) -> TrainerState:
    """Return the state of a checkpoint; without a learner its reference is 0-0 and its `rng` is empty."""
    return TrainerState(
        run="demo",
        version=version,
        train_s=0.0,
        num_rollouts_trained=0,
        reference_version="0-0" if learner is None else str(learner.reference.version),
        rng={} if learner is None else dict(learner.rng.bit_generator.state),
        torch_rng=encode_torch_rng(),
        config_sha256="0" * 64,
        model_config_sha256="0" * 64,
        policy_temperature=1.0,
    )
