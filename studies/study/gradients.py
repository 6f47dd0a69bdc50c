"""How noisy the gradient of a batch of fixed size is, by the size K of its groups, and where the noise comes from.

A batch has P = N / K prompts with K rollouts each, and the baseline of a rollout is the mean of its group, itself
included. Of a prompt x the expected contribution is then (1 - 1/K) g_x, with g_x its true gradient, and

    between   variance of the batch's gradient because its prompts were drawn:  (1 - 1/K)^2 Var[g_x] / P
    within    because their rollouts were drawn: (1 - 1/K) V / N, V the variance of one rollout about a perfect baseline
    signal    |(1 - 1/K) E[g_x]|^2

up to terms of order 1/K^2 of `within`. Relative to the signal, with P = N / K:

    between  K Var[g_x] / (N |E g_x|^2)        grows as K: fewer different prompts
    within   K / (K - 1) V / (N |E g_x|^2)     falls towards 1: the group mean is a better baseline

So the least noise is at K = 1 + sqrt(V / Var[g_x]), and a larger group only pays where prompts have gradients that are
alike. The claim that noise falls with K is about `within` alone, at a fixed number of prompts.
"""

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

from studies.study.cells import Cell
from studies.study.training import BATCH_ROLLOUTS, Scorer, make_groups, recipe_of
from studies.study.world import NUM_TRAIN, TASKS, Problems, sample
from tba.wire import Batch

NUM_SETS, NUM_REPEATS = 24, 4
"""Sets of prompts, and batches with each."""


def gradient_noise(cell: Cell, start: Path) -> dict[str, Any]:
    """On-policy batches of the starting model, never an optimizer step.

    Returns:
        The figures of `noise_of`, for the gradient before any clip.
    """
    began_s, world = time.process_time(), cell.world
    torch.manual_seed(cell.seed)
    recipe = recipe_of(cell, start)
    model, twin = (load_policy(recipe.model, device="cpu", gradient_checkpointing=False) for _ in range(2))
    learner = Learner(model, recipe, np.random.default_rng(cell.seed))
    generator = torch.Generator().manual_seed(cell.seed)
    problems = Problems.of(world.task, "train", NUM_TRAIN, cell.seed)
    scorer = Scorer(problems, world, cell.seed)
    rng = np.random.default_rng([cell.seed, 1])
    found, limit = [], TASKS[world.task].max_response_tokens
    for number in range(NUM_SETS):
        rows = rng.choice(len(problems), size=BATCH_ROLLOUTS // world.group_size, replace=False).tolist()
        for repeat in range(NUM_REPEATS):
            samples = sample(twin, problems.prompts[rows], world.group_size, limit, generator)
            first = (number * NUM_REPEATS + repeat) * BATCH_ROLLOUTS
            groups = make_groups(problems, scorer, rows, samples, 0, first=first, step=1)
            batch = Batch(batch_id=f"{first}", deadline_s=0.0, seed=0, log_position=0, groups=tuple(groups))
            learner.gradients(batch, step=1, policy_ages=[0] * BATCH_ROLLOUTS)
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double())
    noise = noise_of(torch.stack(found).reshape(NUM_SETS, NUM_REPEATS, -1))
    return {**noise, "cpu_s": round(time.process_time() - began_s, 2)}


def noise_of(gradients: Float[Tensor, "sets repeats D"]) -> dict[str, float]:
    """`within`, `between` (traces of covariances) and `signal` (squared norm of the mean gradient), without bias."""
    num_sets, num_repeats, _ = gradients.shape
    means = gradients.mean(dim=1)  # [sets, D]
    within = float(gradients.var(dim=1).sum(dim=1).mean())
    of_means = float(means.var(dim=0).sum())
    signal = float(means.mean(dim=0).square().sum()) - of_means / num_sets
    found = {"within": within, "between": of_means - within / num_repeats, "signal": signal}
    return {name: float(f"{value:.4g}") for name, value in found.items()}
