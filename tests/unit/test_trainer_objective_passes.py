"""Every objective through the learner: one gradient for every cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tba_trainer.learner.learner import Learner
from tba_trainer.model.policy import load_policy

from tba.config.objective import PRESETS
from tba.wire import Batch
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import make_batch, make_recipe

NUM_GROUPS, GROUP_SIZE = 3, 4


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=16, num_layers=1)


def batch_of_different_rewards() -> Batch:
    batch, rng = make_batch(0, num_groups=NUM_GROUPS, group_size=GROUP_SIZE), np.random.default_rng(1)
    groups = [
        replace(g, rollouts=tuple(replace(r, reward=float(rng.normal())) for r in g.rollouts)) for g in batch.groups
    ]
    return replace(batch, groups=tuple(groups))


def step(one_layer: Path, preset: str, micro_batch_tokens: int) -> tuple[torch.Tensor, dict[str, float | None]]:
    """The gradient of one batch, and its metrics; theta is away from the reference."""
    trainer = {"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": 1e9}
    recipe = make_recipe(one_layer, objective={"preset": preset, "beta": 0.3}, trainer=trainer)
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    learner = Learner(model, recipe, np.random.default_rng(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    ages = [0, 40, 3] * (NUM_GROUPS * GROUP_SIZE // 3)
    metrics = learner.gradients(batch_of_different_rewards(), step=1, policy_ages=ages)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_does_not_depend_on_micro_batching(one_layer: Path, preset: str) -> None:
    """4096 tokens: one pass for all. 60: groups whole in several passes. 15: groups span micro-batches."""
    whole, metrics = step(one_layer, preset, 4096)
    assert whole.norm() > 1e-5
    for micro_batch_tokens in (60, 15):
        found, cut = step(one_layer, preset, micro_batch_tokens)
        assert float((found - whole).norm() / whole.norm()) < 1e-4
        for name in ("loss", "advantage_abs_mean", "clipped_share", "tied_group_share"):
            assert cut[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
