"""The identities of the objective (docs/algorithm.md), in float64, against formulas written out independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tba_trainer.objective import ObjectiveInputs, Sequences, advantages, objective
from torch import Tensor

from tba.config import ObjectiveSection

BETA = 0.07
K, R, VOCAB = 6, 5, 9


class Problem:
    """One group: K rollouts of R tokens, whose log-probs are a differentiable function of `theta`."""

    def __init__(self, seed: int, *, on_policy: bool = False) -> None:
        self._rng = np.random.default_rng(seed)
        self.tokens = torch.tensor(self._rng.integers(0, VOCAB, (K, R)))
        self.theta = torch.tensor(self._rng.normal(size=(R, VOCAB)), requires_grad=True)
        self.reward = torch.tensor(self._rng.normal(size=K))
        self.ref = self._normal(K) * 2 - 8
        self.sampler = self.logprobs().detach() if on_policy else self.logprobs().detach() + self._normal(K, R) * 0.3

    def _normal(self, *shape: int) -> Tensor:
        return torch.tensor(self._rng.normal(size=shape))

    def logprobs(self) -> Tensor:
        return self.theta.log_softmax(1)[torch.arange(R), self.tokens]

    def log_ratio(self) -> Tensor:
        return self.logprobs().sum(1) - self.ref

    def gradient_of(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.theta)
        return gradient

    def gradient(self, preset: str, *, beta: float = BETA, age: int = 0, max_age: int = 32) -> Tensor:
        section = ObjectiveSection(preset=preset, centre_max_age_steps=max_age)  # pyright: ignore[reportArgumentType]
        inputs = ObjectiveInputs(
            logprobs=self.logprobs(),
            sampler_logprobs=self.sampler,
            ref_logprob=self.ref,
            mask=torch.ones(K, R, dtype=torch.bool),
            reward=self.reward,
            policy_age=torch.full((K,), age),
            group=torch.zeros(K, dtype=torch.long),
        )
        loss, _ = objective(inputs, section, beta=beta, num_rollouts=K)
        return self.gradient_of(loss)

    def vargrad_loss(self, *, detach_log_z: bool, shift: float = 0.0) -> Tensor:
        """arXiv 2503.18929, Eq. 5."""
        log_ratio = self.log_ratio() + shift
        log_z = (self.reward / BETA - log_ratio).mean()
        log_z = log_z.detach() if detach_log_z else log_z
        return (log_z + log_ratio - self.reward / BETA).square().mean()


def assert_same(left: Tensor, right: Tensor) -> None:
    assert float((left - right).norm() / right.norm()) < 1e-6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_detaching_log_z_does_not_change_the_gradient(seed: int) -> None:
    problem = Problem(seed)
    attached = problem.gradient_of(problem.vargrad_loss(detach_log_z=False))
    detached = problem.gradient_of(problem.vargrad_loss(detach_log_z=True))
    assert_same(attached, detached)
    assert_same(problem.gradient("tb"), BETA / 2 * attached)


def test_a_constant_added_to_every_log_ratio_of_a_group_changes_nothing() -> None:
    problem = Problem(0)
    before, loss = problem.gradient("tb"), problem.vargrad_loss(detach_log_z=True)
    shifted = problem.vargrad_loss(detach_log_z=True, shift=17.0)
    assert float(((shifted - loss) / loss).detach().abs()) < 1e-6
    problem.ref = problem.ref - 17.0
    assert_same(problem.gradient("tb"), before)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_behaviour_centring_adds_the_gradient_of_a_trust_region_on_the_common_drift(seed: int) -> None:
    problem = Problem(seed)
    drift = (problem.logprobs().sum(1) - problem.sampler.sum(1)).mean()
    trust_region = problem.gradient_of(BETA / 2 * drift.square())
    assert_same(problem.gradient("tba_prime_unweighted"), problem.gradient("tb") + trust_region)


def test_behaviour_centring_is_the_group_mean_under_the_behaviour_policy() -> None:
    problem = Problem(4)
    log_ratio = problem.log_ratio().detach()
    centre = (problem.sampler.sum(1) - problem.ref).mean()
    expected = problem.reward - problem.reward.mean() - BETA * (log_ratio - centre)
    assert_same(problem.gradient("tba_prime_unweighted"), problem.gradient_of(-(expected * problem.log_ratio()).mean()))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_policy_the_gradient_is_rloo_up_to_a_constant(seed: int) -> None:
    problem = Problem(seed, on_policy=True)
    shaped = problem.reward - BETA * problem.log_ratio().detach()  # the KL is part of the reward
    others = (shaped.sum() - shaped) / (K - 1)
    rloo = problem.gradient_of(-((shaped - others) * problem.logprobs().sum(1)).mean())
    assert_same(problem.gradient("tb"), rloo * (K - 1) / K)


@pytest.mark.parametrize("beta", [0.004, 0.07, 1.0])
def test_the_a_form_is_beta_over_two_times_the_raw_loss(beta: float) -> None:
    problem = Problem(5)
    log_z = (problem.reward / beta - problem.log_ratio()).mean().detach()
    raw = (log_z + problem.log_ratio() - problem.reward / beta).square().mean()
    assert_same(problem.gradient("tb", beta=beta), beta / 2 * problem.gradient_of(raw))


def test_beyond_the_age_limit_the_centre_is_theta() -> None:
    problem = Problem(6)
    assert_same(problem.gradient("tba_prime_unweighted", age=33), problem.gradient("tb"))
    assert not torch.allclose(problem.gradient("tba_prime_unweighted", age=32), problem.gradient("tb"))


def test_in_a_group_of_mixed_age_only_the_young_are_centred_by_their_own_drift() -> None:
    problem = Problem(7)
    age = torch.tensor([0, 5, 33, 40, 2, 100])
    young = age <= 32
    logprob = problem.logprobs().sum(1).detach()
    sequences = Sequences(
        logprob=logprob,
        sampler_logprob=problem.sampler.sum(1),
        ref_logprob=problem.ref,
        reward=problem.reward,
        policy_age=age,
        group=torch.zeros(K, dtype=torch.long),
    )
    tb = advantages(sequences, ObjectiveSection(preset="tb"), beta=BETA)
    mixed = advantages(sequences, ObjectiveSection(preset="tba_prime_unweighted"), beta=BETA)
    drift = (logprob - problem.sampler.sum(1))[young].mean()
    assert torch.equal(mixed[~young], tb[~young])
    assert_same(mixed[young], tb[young] - BETA * drift)


def test_token_weights_are_clamped_ratios_without_gradient() -> None:
    problem = Problem(8)
    problem.sampler[0, 0] -= 50.0  # an outlier whose ratio is far above the clamp
    logprobs = problem.logprobs()
    weight = (logprobs.detach() - problem.sampler).exp().clamp(max=8.0)
    assert float(weight[0, 0]) == 8.0
    log_ratio = logprobs.detach().sum(1) - problem.ref
    centre = (problem.sampler.sum(1) - problem.ref).mean()
    advantage = problem.reward - problem.reward.mean() - BETA * (log_ratio - centre)
    expected = problem.gradient_of(-(advantage[:, None] * weight * logprobs).sum() / K)
    assert_same(problem.gradient("tba_prime"), expected)


def test_padded_places_take_no_part() -> None:
    problem = Problem(9)
    pad = torch.zeros(K, 3, dtype=torch.float64)

    def gradient(filler: float) -> Tensor:
        inputs = ObjectiveInputs(
            logprobs=torch.cat([problem.logprobs(), pad], dim=1),
            sampler_logprobs=torch.cat([problem.sampler, pad + filler], dim=1),
            ref_logprob=problem.ref,
            mask=torch.cat([torch.ones(K, R), pad], dim=1).bool(),
            reward=problem.reward,
            policy_age=torch.zeros(K, dtype=torch.long),
            group=torch.zeros(K, dtype=torch.long),
        )
        return problem.gradient_of(
            objective(inputs, ObjectiveSection(preset="tba_prime"), beta=BETA, num_rollouts=K)[0]
        )

    assert_same(gradient(0.0), problem.gradient("tba_prime"))
    assert_same(gradient(-3.0), problem.gradient("tba_prime"))


def test_group_statistics_are_per_prompt() -> None:
    rng = np.random.default_rng(3)
    group = torch.tensor([4, 9, 4, 9, 9, 4])
    values = {
        name: torch.tensor(rng.normal(size=6)) for name in ("logprob", "sampler_logprob", "ref_logprob", "reward")
    }
    section = ObjectiveSection(preset="tba_prime_unweighted")
    together = advantages(
        Sequences(**values, policy_age=torch.zeros(6, dtype=torch.long), group=group), section, beta=BETA
    )
    for number in (4, 9):
        rows = group == number
        alone = advantages(
            Sequences(
                **{name: value[rows] for name, value in values.items()},
                policy_age=torch.zeros(3, dtype=torch.long),
                group=group[rows],
            ),
            section,
            beta=BETA,
        )
        assert_same(together[rows], alone)
