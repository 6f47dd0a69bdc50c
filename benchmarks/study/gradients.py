"""C6: how noisy the gradient of a batch of fixed size is, by the size of its groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy
from torch import Tensor

from benchmarks.study.training import Settings, make_groups, recipe_of
from benchmarks.study.world import Problems, sample
from tba.wire import Batch

NUM_ROLLOUTS = 128
NUM_BATCHES = 40
"""Number of batches in the mean; a signal is clear when it is well above the variance divided by this number."""


def gradient_noise(start: Path, *, group_size: int, beta: float, seed: int) -> dict[str, Any]:
    """On-policy batches of 128 rollouts of the starting model, 128 / K prompts each, never an optimizer step.

    Returns:
        The figures of `noise_of` for TB's on-policy gradient before any clip.
    """
    began_s = time.process_time()
    torch.manual_seed(seed)
    settings = Settings(
        objective={"preset": "tb", "beta": {"value": beta}},
        learning_rate=0.0001,
        lag=0,
        seed=seed,
        num_steps=NUM_BATCHES,
        num_prompts=NUM_ROLLOUTS // group_size,
        group_size=group_size,
        max_grad_norm=1e9,
    )
    recipe = recipe_of(settings, start)
    model, twin = (load_policy(recipe.model, device="cpu", gradient_checkpointing=False) for _ in range(2))
    learner = Learner(model, recipe, np.random.default_rng(seed))
    generator = torch.Generator().manual_seed(seed)
    problems = Problems.of("train", 3000, seed)
    rng = np.random.default_rng([seed, 1])
    found = []
    for number in range(NUM_BATCHES):
        rows = rng.choice(len(problems), size=settings.num_prompts, replace=False).tolist()
        samples = sample(twin, problems.prompts[rows], group_size, generator)
        groups = make_groups(problems, rows, samples, 0, first=number * settings.num_prompts)
        batch = Batch(batch_id=f"{number}", deadline_s=0.0, seed=0, log_position=0, groups=tuple(groups))
        learner.gradients(batch, step=1, policy_ages=[0] * NUM_ROLLOUTS)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double())
    return {**noise_of(torch.stack(found)), "cpu_s": round(time.process_time() - began_s, 2)}


def noise_of(gradients: Float[Tensor, "num_batches P"]) -> dict[str, float | None]:
    """`variance` (trace of the covariance), `signal` (squared norm of the mean, less what noise adds to it) and their
    ratio, None where the mean is lost in the noise."""
    variance = float(gradients.var(dim=0).sum())
    signal = float(gradients.mean(dim=0).square().sum()) - variance / len(gradients)
    return {
        "relative_variance": round(variance / signal, 3) if signal > 0 else None,
        "variance": float(f"{variance:.4g}"),
        "signal": float(f"{signal:.4g}"),
    }
