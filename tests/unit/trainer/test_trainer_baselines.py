"""The baselines in policy-gradient form against autograd of their literal formulas, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tba_trainer.objectives import advantages, tied_group_share
from torch import Tensor

from tests.support.objective_values import MAX_TOKENS, Problem, assert_same, make_problem, objective_of

BETA = 0.07
SIZES = (4, 3, 5)
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2, 3])
EPSILON = 1e-4


def members(problem: Problem) -> list[list[int]]:
    return [(problem.group == number).nonzero()[:, 0].tolist() for number in problem.group.unique()]


def shaped(problem: Problem) -> Tensor:
    """The reward with the KL in it, once per rollout."""
    return (problem.reward - BETA * (problem.logprob() - problem.ref)).detach()


def centred(problem: Problem, values: Tensor | None = None) -> Tensor:
    """By default the rewards with the KL in them."""
    values, out = shaped(problem) if values is None else values, torch.zeros(problem.num_rollouts, dtype=torch.float64)
    for rows in members(problem):
        out[rows] = values[rows] - values[rows].mean()
    return out


def centred_kl(problem: Problem) -> Tensor:
    return centred(problem, BETA * (problem.logprob() - problem.ref).detach())


def clipped(ratio: Tensor, advantage: Tensor | float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def rho(problem: Problem, row: int) -> Tensor:
    return (problem.logprobs(row) - problem.sampler[row]).exp()


def grpo(problem: Problem) -> Tensor:
    advantage = centred(problem, problem.reward)
    for rows in members(problem):
        advantage[rows] = advantage[rows] / (problem.reward[rows].std() + EPSILON)
    advantage = advantage - centred_kl(problem)
    terms = [clipped(rho(problem, row), advantage[row]).mean() for row in range(problem.num_rollouts)]
    return -torch.stack(terms).mean()


def dr_grpo(problem: Problem) -> Tensor:
    """The sum over tokens divided by a constant, the longest response there may be."""
    advantage = centred(problem)
    terms = [clipped(rho(problem, row), advantage[row]).sum() / MAX_TOKENS for row in range(problem.num_rollouts)]
    return -torch.stack(terms).mean()


def dr_grpo_clamp(problem: Problem) -> Tensor:
    advantage = centred(problem)
    terms = [
        (rho(problem, row).detach().clamp(max=8.0) * advantage[row] * problem.logprobs(row)).sum()
        for row in range(problem.num_rollouts)
    ]
    return -torch.stack(terms).mean()


def leave_one_out(problem: Problem) -> Tensor:
    reward, out = shaped(problem), torch.zeros(problem.num_rollouts, dtype=torch.float64)
    for rows in members(problem):
        for row in rows:
            out[row] = reward[row] - reward[[other for other in rows if other != row]].mean()
    return out


def rloo(problem: Problem) -> Tensor:
    return -(leave_one_out(problem) * problem.logprob()).mean()


def proximal_rloo(problem: Problem) -> Tensor:
    ratio = (problem.logprob() - problem.sampler_logprob()).exp()
    return -clipped(ratio, leave_one_out(problem)).mean()


def ppo_clip(problem: Problem) -> Tensor:
    advantage = centred(problem, problem.reward)
    advantage = advantage / (advantage.std() + EPSILON) - centred_kl(problem)
    terms = [clipped(rho(problem, row), advantage[row]) for row in range(problem.num_rollouts)]
    return -torch.cat(terms).mean()


def reinforce(problem: Problem) -> Tensor:
    reward = shaped(problem)
    return -((reward - reward.mean()) * problem.logprob()).mean()


def online_dpo(problem: Problem) -> Tensor:
    ratio, terms = problem.logprob() - problem.ref, []
    for rows in members(problem):
        best, worst = max(rows, key=lambda r: problem.reward[r]), min(rows, key=lambda r: problem.reward[r])
        terms.append(-torch.nn.functional.logsigmoid(BETA * (ratio[best] - ratio[worst])))
    return torch.stack(terms).mean() / BETA


LITERAL: dict[str, Callable[[Problem], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dr_grpo_clamp": dr_grpo_clamp,
    "rloo": rloo,
    "proximal_rloo": proximal_rloo,
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
    "online_dpo": online_dpo,
}


@SEEDS
@pytest.mark.parametrize("preset", LITERAL)
def test_the_gradient_is_that_of_the_literal_formula(preset: str, seed: int) -> None:
    problem = make_problem(seed, sizes=SIZES, drift=0.5)
    expected = problem.gradient_of(LITERAL[preset](problem))
    assert_same(problem.gradient(objective_of(preset, beta=BETA), beta=BETA), expected)


@pytest.mark.parametrize("preset", ["grpo", "ppo_clip", "proximal_rloo"])
def test_the_clip_is_active_for_some_tokens_and_only_where_it_takes_the_advantage_further(preset: str) -> None:
    """The sign of A decides: flipping every reward clips other tokens."""
    problem = make_problem(0, sizes=SIZES, drift=0.5)
    objective = objective_of(preset)
    _, metrics = problem.loss(objective, beta=0.0)
    assert 0 < metrics["clipped_share"] < 1
    problem.reward.neg_()
    _, flipped = problem.loss(objective, beta=0.0)
    assert 0 < flipped["clipped_share"] < 1
    assert flipped["clipped_share"] != metrics["clipped_share"]


def test_on_policy_nothing_is_clipped() -> None:
    problem = make_problem(0, sizes=SIZES, drift=0.0)
    for preset in ("grpo", "ppo_clip", "proximal_rloo", "dr_grpo", "dr_grpo_clamp"):
        assert problem.loss(objective_of(preset), beta=0.0)[1]["clipped_share"] == 0.0


@pytest.mark.parametrize("preset", LITERAL)
def test_a_ratio_without_bounds_gives_a_finite_gradient(preset: str) -> None:
    problem = make_problem(1, sizes=SIZES)
    problem.sampler[0][:] -= 1e4
    problem.reward[:4] = 0.5  # also in a group whose advantages are all 0
    assert problem.gradient(objective_of(preset), beta=BETA).isfinite().all()


@pytest.mark.parametrize("preset", sorted(set(LITERAL) - {"reinforce"}))
def test_a_group_of_one_and_a_group_of_equal_rewards_teach_nothing(preset: str) -> None:
    problem = make_problem(2, sizes=(1, 4, 3))
    problem.reward[1:5] = 1.0
    found = advantages(problem.sequences(), objective_of(preset, beta=0.1), beta=0.0)
    assert found[:5].abs().max() < 1e-9
    assert found[5:].abs().max() > 0.1
    assert tied_group_share(problem.reward, problem.group) == pytest.approx(2 / 3)


@pytest.mark.parametrize("preset", ["grpo", "ppo_clip"])
def test_in_a_group_of_equal_rewards_the_kl_pulls_in_proportion_to_beta(preset: str) -> None:
    """The deviation is taken over the rewards: the KL is never divided by its own noise, in which beta would cancel."""
    problem = make_problem(2, sizes=(4, 3))
    problem.reward[:4] = 1.0
    objective = objective_of(preset, beta=0.1)
    ratio = (problem.logprob() - problem.ref).detach()[:4]
    for beta in (0.001, 0.1):
        found = advantages(problem.sequences(), objective, beta=beta)
        assert_same(found[:4], -beta * (ratio - ratio.mean()))
        assert found[4:].abs().max() > 0.1  # rewards differ there


def test_reinforce_learns_from_groups_of_one() -> None:
    problem = make_problem(2, sizes=(1, 1, 1))
    found = advantages(problem.sequences(), objective_of("reinforce"), beta=0.0)
    assert_same(found, problem.reward - problem.reward.mean())


def test_online_dpo_shares_the_pull_among_rollouts_with_the_same_reward() -> None:
    problem = make_problem(3, sizes=(4,))
    problem.reward[:] = torch.tensor([1.0, 0.0, 1.0, 0.5])
    found = advantages(problem.sequences(), objective_of("online_dpo"), beta=BETA)
    ratio = problem.logprob().detach() - problem.ref
    pulls = [torch.sigmoid(-BETA * (ratio[best] - ratio[1])) / 2 for best in (0, 2)]
    assert_same(found, torch.stack([pulls[0], -(pulls[0] + pulls[1]), pulls[1], torch.zeros_like(pulls[0])]))


def test_dr_grpo_clamp_with_a_kl_is_tb_with_an_importance_weight() -> None:
    problem = make_problem(4, sizes=SIZES, drift=0.5)
    weighted = problem.gradient(objective_of("tb", importance_weight="clamp"), beta=BETA)
    assert_same(problem.gradient(objective_of("dr_grpo_clamp", beta=BETA), beta=BETA), weighted)


def test_what_an_objective_needs_of_a_batch() -> None:
    assert not objective_of("grpo").reads_theta
    assert objective_of("grpo", beta=0.1).needs_complete_groups
    assert not objective_of("grpo", beta=0.1).needs_complete_batch
    assert objective_of("ppo_clip").needs_complete_batch
    assert objective_of("reinforce").needs_complete_batch
    assert objective_of("kimi").reads_theta
    assert not objective_of("kimi").needs_complete_groups
    assert objective_of("tb").needs_complete_groups
