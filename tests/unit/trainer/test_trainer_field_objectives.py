"""Objectives of the field and their parts against autograd of their literal formulas, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tba_trainer.objectives import advantages, second_moment_cut
from torch import Tensor

from tests.support.objective_values import MAX_TOKENS, Problem, assert_same, make_problem, objective_of

BETA = 0.07
SIZES = (4, 3, 5)
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2, 3])
EPSILON = 1e-4
TINY = 1e-12


def groups(problem: Problem) -> list[list[int]]:
    return [(problem.group == number).nonzero()[:, 0].tolist() for number in problem.group.unique()]


def centred(problem: Problem, *, deviation: bool) -> list[Tensor]:
    """r - mean r of the group, divided by its deviation or not."""
    out: list[Tensor] = [torch.zeros(())] * problem.num_rollouts
    for rows in groups(problem):
        rewards = problem.reward[rows]
        for row in rows:
            out[row] = (problem.reward[row] - rewards.mean()) / (rewards.std() + EPSILON if deviation else 1.0)
    return out


def ratio(problem: Problem, row: int) -> Tensor:
    """pi_theta / pi_sampler per token, with gradient."""
    return (problem.logprobs(row) - problem.sampler[row]).exp()


def ppo(rho: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(rho * advantage, rho.clamp(1 - low, 1 + high) * advantage)


def dapo(problem: Problem) -> Tensor:
    """Arxiv 2503.14476, Eq. 8: clip-higher, and a mean over all tokens."""
    advantage = centred(problem, deviation=True)
    terms = [ppo(ratio(problem, row), advantage[row], 0.2, 0.28) for row in range(problem.num_rollouts)]
    return -torch.cat(terms).mean()


def gspo(problem: Problem) -> Tensor:
    """Arxiv 2507.18071, Eq. 5 and 7: one ratio per sequence, the geometric mean of its tokens."""
    advantage = centred(problem, deviation=True)
    terms = []
    for row in range(problem.num_rollouts):
        sequence = (problem.logprobs(row) - problem.sampler[row]).mean().exp()
        terms.append(ppo(sequence, advantage[row], 3e-4, 4e-4))
    return -torch.stack(terms).mean()


def cispo(problem: Problem) -> Tensor:
    """Arxiv 2506.13585, Eq. 4 and 5 without a lower bound: the clipped weight has no gradient."""
    advantage = centred(problem, deviation=True)
    terms = [
        ratio(problem, row).clamp(max=5.0).detach() * advantage[row] * problem.logprobs(row)
        for row in range(problem.num_rollouts)
    ]
    return -torch.cat(terms).mean()


def m2po(problem: Problem) -> Tensor:
    """Arxiv 2510.01161: drop the largest (log rho)^2, one after the other, until the mean of the rest is below 0.04."""
    advantage = centred(problem, deviation=True)
    squares = torch.cat([(problem.logprobs(row) - problem.sampler[row]).detach() ** 2 for row in range(12)])
    kept = torch.ones(len(squares), dtype=torch.bool)
    while kept.any() and squares[kept].mean() >= 0.04:
        kept[torch.where(kept, squares, -1.0).argmax()] = False
    assert 0 < kept.sum() < len(kept)
    terms = torch.cat([ratio(problem, row) * advantage[row] for row in range(problem.num_rollouts)])
    return -(terms * kept).sum() / len(kept)


def oapl(problem: Problem) -> Tensor:
    """Arxiv 2602.19362: (beta log pi / pi_beh - (r - V))^2, V = beta log mean exp(r / beta), divided by 2 beta."""
    terms = []
    for rows in groups(problem):
        value = BETA * (problem.reward[rows] / BETA).exp().mean().log()
        for row in rows:
            log_ratio = problem.logprobs(row).sum() - problem.sampler[row].sum()
            terms.append((BETA * log_ratio - (problem.reward[row] - value)).square() / (2 * BETA))
    return torch.stack(terms).mean()


def tba_prime_published(problem: Problem) -> Tensor:
    """The published code of TBA': reference.

    Per micro-batch of one sequence: the token mean over its prompt and response of clamp(rho, 0, 8) A, the clamp inside
    autograd; A the centred reward minus beta (l_j - mean of l' of the group); l and l' sums of log-ratios to the
    reference, every token clamped to +-10; l', and the denominator of rho, under the snapshot that sampled, computed by
    the trainer.
    """
    terms = []
    for rows in groups(problem):
        mean_reward = sum(float(problem.reward[row]) for row in rows) / len(rows)
        behaviour = [(problem.recomputed[row] - problem.ref_tokens[row]).clamp(-10, 10).sum() for row in rows]
        centre = torch.stack(behaviour).mean()
        for row in rows:
            logprobs = problem.logprobs(row)
            log_ratio = (logprobs.detach() - problem.ref_tokens[row]).clamp(-10, 10).sum()
            advantage = problem.reward[row] - mean_reward - BETA * (log_ratio - centre)
            rho = (logprobs - problem.recomputed[row]).exp().clamp(0.0, 8.0)
            terms.append((rho * advantage).sum() / (problem.prompt_lengths[row] + len(logprobs)))
    return -torch.stack(terms).mean()


LITERAL: dict[str, Callable[[Problem], Tensor]] = {
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "m2po": m2po,
    "oapl": oapl,
    "tba_prime_published": tba_prime_published,
}


def far_problem(seed: int) -> Problem:
    """Drifted so far that every bound is reached by some token."""
    problem = make_problem(seed, sizes=SIZES, drift=0.6)
    for row, shift in ((0, -3.0), (5, 2.5), (9, -2.6)):
        problem.sampler[row][0] += shift
        problem.recomputed[row][0] += shift
    problem.ref_tokens[2][0] -= 12.0  # beyond the token clamp of the published TBA'
    return problem


@SEEDS
@pytest.mark.parametrize("preset", LITERAL)
def test_the_gradient_is_that_of_the_literal_formula(preset: str, seed: int) -> None:
    problem, beta = far_problem(seed), BETA * (preset in ("oapl", "tba_prime_published"))
    objective = objective_of(preset, beta=beta)
    expected = problem.gradient_of(LITERAL[preset](problem))
    found = problem.gradient(objective, beta=beta)
    assert float(((found - expected).norm() / expected.norm()).detach()) < TINY
    if preset != "oapl":
        assert problem.loss(objective, beta=beta)[1]["clipped_share"] > 0


def test_ours_is_not_the_published_tba_prime() -> None:
    """The divisor and the token clamp are part of it: only all keys together make it."""
    problem, published = far_problem(0), objective_of("tba_prime_published", beta=BETA)
    expected = problem.gradient(published, beta=BETA)
    for changed in ({"aggregation": "rollouts"}, {"log_ratio_token_clamp": 100.0}, {"importance_weight": "clamp"}):
        other = problem.gradient(objective_of("tba_prime_published", beta=BETA, **changed), beta=BETA)
        assert float(((other - expected).norm() / expected.norm()).detach()) > 1e-3


# ---- Parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "divisor"),
    [
        ("rollouts", lambda p, row: p.num_rollouts),
        ("groups", lambda p, row: len(SIZES)),
        ("tokens", lambda p, row: int(p.lengths.sum())),
        ("sequence_mean", lambda p, row: p.num_rollouts * int(p.lengths[row])),
        ("whole_sequence_mean", lambda p, row: p.num_rollouts * int(p.lengths[row] + p.prompt_lengths[row])),
        ("constant", lambda p, row: p.num_rollouts * MAX_TOKENS),
    ],
)
def test_aggregations_divide_as_they_say(aggregation: str, divisor: Callable[[Problem, int], int]) -> None:
    problem = far_problem(0)
    advantage = advantages(problem.sequences(), objective_of("rloo"), beta=0.0)
    literal = torch.stack(
        [-advantage[row] * problem.logprobs(row).sum() / divisor(problem, row) for row in range(problem.num_rollouts)]
    ).sum()
    found = problem.gradient(objective_of("rloo", aggregation=aggregation), beta=0.0)
    assert_same(found, problem.gradient_of(literal))


@SEEDS
@pytest.mark.parametrize("factor", [0.0, 0.3])
def test_the_negative_weight_scales_what_lies_below_the_baseline(seed: int, factor: float) -> None:
    """max(A, 0) + factor min(A, 0) times log pi, with PPO's clip and, in the family, with the KL in A."""
    problem, advantage = far_problem(seed), centred(far_problem(seed), deviation=True)
    terms = [
        (factor if advantage[row] < 0 else 1.0) * ppo(ratio(problem, row), advantage[row], 0.2, 0.2).mean()
        for row in range(problem.num_rollouts)
    ]
    expected = problem.gradient_of(-torch.stack(terms).mean())
    assert_same(problem.gradient(objective_of("grpo", negative_weight=factor), beta=0.0), expected)
    found = objective_of("tb_positive", negative_weight=factor)
    pull = advantages(problem.sequences(), objective_of("tb_positive", negative_weight=1.0), beta=BETA)
    assert 0 < int((pull < 0).sum()) < problem.num_rollouts
    pull = pull.clamp(min=0) + factor * pull.clamp(max=0)
    literal = [-pull[row] * problem.logprobs(row).sum() for row in range(problem.num_rollouts)]
    assert_same(problem.gradient(found, beta=BETA), problem.gradient_of(torch.stack(literal).mean()))


def test_raft_imitates_the_best_of_each_group() -> None:
    problem = make_problem(0, sizes=(4, 3, 2))
    problem.reward[:] = torch.tensor([1.0, 0.0, 1.0, 0.5, 3.0, 2.0, 1.0, 0.7, 0.7])
    # two share the best of the first group; the rewards of the last are equal, so nothing is known to be better
    literal = -((problem.logprobs(0).sum() + problem.logprobs(2).sum()) / 2 + problem.logprobs(4).sum()) / 3
    assert_same(problem.gradient(objective_of("raft"), beta=0.0), problem.gradient_of(literal))


# ---- The second moment ----------------------------------------------------------------------------------------------


def test_as_few_tokens_go_as_bring_the_second_moment_below_its_limit() -> None:
    squares = torch.tensor([0.5, 0.01, 0.3, 0.02], dtype=torch.float64)
    assert second_moment_cut(squares, 1.0) == 0.5
    assert second_moment_cut(squares, 0.2) == pytest.approx(0.3)  # (0.01 + 0.02 + 0.3) / 3 = 0.11
    assert second_moment_cut(squares, 0.105) == pytest.approx(0.02)
    assert second_moment_cut(squares, 0.001) < 0
    assert second_moment_cut(torch.zeros(4), 0.04) == 0.0  # on-policy nothing goes


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo", "m2po"])
def test_on_policy_nothing_is_bounded(preset: str) -> None:
    problem = make_problem(0, sizes=SIZES, drift=0.0)
    assert problem.loss(objective_of(preset), beta=0.0)[1]["clipped_share"] == 0.0
