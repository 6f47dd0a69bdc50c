"""The enumerable task (64 outcomes: vocabulary 4, length 3): where each objective converges, with exact expected
gradients. A pair of rollouts (K = 2) of every two outcomes is one group, weighted by its probability."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
import torch
from tba_trainer.objective import Sequences, advantages
from torch import Tensor

from tba.config import ObjectiveSection

VOCAB, LENGTH = 4, 3
BETA = 0.25
OUTCOMES = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))  # [64, 3]
FIRST, SECOND = (index.flatten() for index in torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij"))
PAIRS = torch.stack([FIRST, SECOND], dim=1).flatten()  # [8192]
PAIR_NUMBER = torch.arange(64 * 64).repeat_interleave(2)
Behaviour = Literal["on-policy", "uniform", "stale"]


class Tabular:
    """An autoregressive policy with its own logits after every prefix."""

    def __init__(self, seed: int, scale: float) -> None:
        rng = np.random.default_rng(seed)
        self.tables = [
            torch.tensor(rng.normal(size=(VOCAB**i, VOCAB)) * scale, requires_grad=True) for i in range(LENGTH)
        ]

    def logprob(self) -> Tensor:
        """log pi of all 64 outcomes."""
        total, prefix = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.long)
        for i, table in enumerate(self.tables):
            total = total + table.log_softmax(1)[prefix, OUTCOMES[:, i]]
            prefix = prefix * VOCAB + OUTCOMES[:, i]
        return total


def train(preset: str, behaviour: Behaviour, *, beta: float = BETA, policy_age: int = 0, num_steps: int = 800) -> float:
    """Total variation between the trained policy and pi* = pi_ref exp(r / BETA) / Z."""
    rng = np.random.default_rng(11)
    reward = torch.tensor(rng.random(64))
    policy, reference = Tabular(1, 0.5), Tabular(1, 0.5).logprob().detach()
    optimum = (reference + reward / BETA).softmax(0)
    stale = Tabular(2, 1.0).logprob().detach()
    section = ObjectiveSection(preset=preset)  # pyright: ignore[reportArgumentType]
    adam = torch.optim.Adam(policy.tables, lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.001 ** (1 / num_steps))
    for _ in range(num_steps):
        logprob = policy.logprob()
        sampler = {
            "on-policy": logprob.detach(),
            "uniform": torch.full((64,), -float(np.log(64)), dtype=torch.float64),
            "stale": stale,
        }[behaviour]
        sequences = Sequences(
            logprob=logprob.detach()[PAIRS],
            sampler_logprob=sampler[PAIRS],
            ref_logprob=reference[PAIRS],
            reward=reward[PAIRS],
            policy_age=torch.full((len(PAIRS),), policy_age),
            group=PAIR_NUMBER,
        )
        advantage = advantages(sequences, section, beta=beta)
        probability = (sampler[FIRST] + sampler[SECOND]).exp().repeat_interleave(2)
        loss = -(probability * advantage * logprob[PAIRS]).sum() / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
        decay.step()
    return float((policy.logprob().detach().exp() - optimum).abs().sum() / 2)


@pytest.mark.parametrize("behaviour", ["on-policy", "uniform", "stale"])
def test_tb_converges_to_the_optimum_under_any_behaviour(behaviour: Behaviour) -> None:
    assert train("tb", behaviour) < 0.02


def test_reinforce_does_not_converge_to_the_optimum() -> None:
    assert train("tb", "on-policy", beta=0.0) > 0.3


def test_behaviour_centring_is_biased_under_a_fixed_stale_behaviour() -> None:
    assert train("tba_prime_unweighted", "stale") > 0.1


def test_the_age_limit_of_behaviour_centring_removes_its_bias() -> None:
    assert train("tba_prime_unweighted", "stale", policy_age=33) < 0.02


def test_behaviour_centring_is_unbiased_on_policy() -> None:
    assert train("tba_prime_unweighted", "on-policy") < 0.02
