"""The baselines and the objectives of the field against autograd of their literal formulas, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tba_trainer.objectives import advantages, reward_spread, second_moment_cut
from torch import Tensor

from tests.support.objective_values import MAX_TOKENS, Problem, assert_same, make_problem, objective_of

BETA = 0.07
SIZES = (4, 3, 5)
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2, 3])
EPSILON = 1e-4
ON_POLICY = ("grpo", "ppo_clip", "proximal_rloo", "dr_grpo", "dr_grpo_clamp", "dapo", "gspo", "cispo", "m2po")


def groups(problem: Problem) -> list[list[int]]:
    return [(problem.group == number).nonzero()[:, 0].tolist() for number in problem.group.unique()]


def shaped(problem: Problem) -> Tensor:
    """The reward with the KL in it, once per rollout."""
    return (problem.reward - BETA * (problem.logprob() - problem.ref)).detach()


def centred(problem: Problem, values: Tensor, *, deviation: bool = False) -> Tensor:
    """Minus the mean of the group, divided by its deviation or not."""
    out = torch.zeros(problem.num_rollouts, dtype=torch.float64)
    for rows in groups(problem):
        out[rows] = (values[rows] - values[rows].mean()) / (values[rows].std() + EPSILON if deviation else 1.0)
    return out


def centred_kl(problem: Problem) -> Tensor:
    return centred(problem, BETA * (problem.logprob() - problem.ref).detach())


def ppo(ratio: Tensor, advantage: Tensor | float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def rho(problem: Problem, row: int) -> Tensor:
    """pi_theta / pi_sampler per token, with gradient."""
    return (problem.logprobs(row) - problem.sampler[row]).exp()


def grpo(problem: Problem) -> Tensor:
    advantage = centred(problem, problem.reward, deviation=True) - centred_kl(problem)
    terms = [ppo(rho(problem, row), advantage[row]).mean() for row in range(problem.num_rollouts)]
    return -torch.stack(terms).mean()


def dr_grpo(problem: Problem) -> Tensor:
    """The sum over tokens divided by a constant, the longest response there may be."""
    advantage = centred(problem, shaped(problem))
    terms = [ppo(rho(problem, row), advantage[row]).sum() / MAX_TOKENS for row in range(problem.num_rollouts)]
    return -torch.stack(terms).mean()


def dr_grpo_clamp(problem: Problem) -> Tensor:
    advantage = centred(problem, shaped(problem))
    terms = [
        (rho(problem, row).detach().clamp(max=8.0) * advantage[row] * problem.logprobs(row)).sum()
        for row in range(problem.num_rollouts)
    ]
    return -torch.stack(terms).mean()


def leave_one_out(problem: Problem) -> Tensor:
    reward, out = shaped(problem), torch.zeros(problem.num_rollouts, dtype=torch.float64)
    for rows in groups(problem):
        for row in rows:
            out[row] = reward[row] - reward[[other for other in rows if other != row]].mean()
    return out


def rloo(problem: Problem) -> Tensor:
    return -(leave_one_out(problem) * problem.logprob()).mean()


def proximal_rloo(problem: Problem) -> Tensor:
    ratio = (problem.logprob() - problem.sampler_logprob()).exp()
    return -ppo(ratio, leave_one_out(problem)).mean()


def ppo_clip(problem: Problem) -> Tensor:
    advantage = centred(problem, problem.reward)
    advantage = advantage / (advantage.std() + EPSILON) - centred_kl(problem)
    terms = [ppo(rho(problem, row), advantage[row]) for row in range(problem.num_rollouts)]
    return -torch.cat(terms).mean()


def reinforce(problem: Problem) -> Tensor:
    reward = shaped(problem)
    return -((reward - reward.mean()) * problem.logprob()).mean()


def online_dpo(problem: Problem) -> Tensor:
    ratio, terms = problem.logprob() - problem.ref, []
    for rows in groups(problem):
        best, worst = max(rows, key=lambda r: problem.reward[r]), min(rows, key=lambda r: problem.reward[r])
        terms.append(-torch.nn.functional.logsigmoid(BETA * (ratio[best] - ratio[worst])))
    return torch.stack(terms).mean() / BETA


BASELINES: dict[str, Callable[[Problem], Tensor]] = {
    each.__name__: each for each in (grpo, dr_grpo, dr_grpo_clamp, rloo, proximal_rloo, ppo_clip, reinforce, online_dpo)
}


def dapo(problem: Problem) -> Tensor:
    """Arxiv 2503.14476, Eq. 8: clip-higher, and a mean over all tokens."""
    advantage = centred(problem, problem.reward, deviation=True)
    terms = [ppo(rho(problem, row), advantage[row], 0.2, 0.28) for row in range(problem.num_rollouts)]
    return -torch.cat(terms).mean()


def gspo(problem: Problem) -> Tensor:
    """Arxiv 2507.18071, Eq. 5 and 7: one ratio per sequence, the geometric mean of its tokens."""
    advantage = centred(problem, problem.reward, deviation=True)
    terms = []
    for row in range(problem.num_rollouts):
        sequence = (problem.logprobs(row) - problem.sampler[row]).mean().exp()
        terms.append(ppo(sequence, advantage[row], 3e-4, 4e-4))
    return -torch.stack(terms).mean()


def cispo(problem: Problem) -> Tensor:
    """Arxiv 2506.13585, Eq. 4 and 5 without a lower bound: the clipped weight has no gradient."""
    advantage = centred(problem, problem.reward, deviation=True)
    terms = [
        rho(problem, row).clamp(max=5.0).detach() * advantage[row] * problem.logprobs(row)
        for row in range(problem.num_rollouts)
    ]
    return -torch.cat(terms).mean()


def m2po(problem: Problem) -> Tensor:
    """Arxiv 2510.01161: drop the largest (log rho)^2, one after the other, until the mean of the rest is below 0.04."""
    advantage = centred(problem, problem.reward, deviation=True)
    squares = torch.cat([(problem.logprobs(row) - problem.sampler[row]).detach() ** 2 for row in range(12)])
    kept = torch.ones(len(squares), dtype=torch.bool)
    while kept.any() and squares[kept].mean() >= 0.04:
        kept[torch.where(kept, squares, -1.0).argmax()] = False
    assert 0 < kept.sum() < len(kept)
    terms = torch.cat([rho(problem, row) * advantage[row] for row in range(problem.num_rollouts)])
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


FIELD: dict[str, Callable[[Problem], Tensor]] = {
    each.__name__: each for each in (dapo, gspo, cispo, m2po, oapl, tba_prime_published)
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
@pytest.mark.parametrize("preset", [*BASELINES, *FIELD])
def test_the_gradient_is_that_of_the_literal_formula(preset: str, seed: int) -> None:
    if preset in BASELINES:
        problem, literal, beta, most = make_problem(seed, sizes=SIZES, drift=0.5), BASELINES[preset], BETA, 1e-6
    else:
        problem, literal, most = far_problem(seed), FIELD[preset], 1e-12
        beta = BETA * (preset in ("oapl", "tba_prime_published"))
    objective = objective_of(preset, beta=beta)
    expected, found = problem.gradient_of(literal(problem)), problem.gradient(objective, beta=beta)
    assert float(expected.norm()) > 0
    assert float(((found - expected).norm() / expected.norm()).detach()) < most
    if preset in FIELD and preset != "oapl":
        assert problem.loss(objective, beta=beta)[1]["clipped_share"] > 0


def test_ours_is_not_the_published_tba_prime() -> None:
    """The divisor and the token clamp are part of it: only all keys together make it."""
    problem, published = far_problem(0), objective_of("tba_prime_published", beta=BETA)
    expected = problem.gradient(published, beta=BETA)
    for changed in ({"aggregation": "rollouts"}, {"log_ratio_token_clamp": 100.0}, {"importance_weight": "clamp"}):
        other = problem.gradient(objective_of("tba_prime_published", beta=BETA, **changed), beta=BETA)
        assert float(((other - expected).norm() / expected.norm()).detach()) > 1e-3


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
    rows = range(problem.num_rollouts)
    literal = torch.stack([-advantage[row] * problem.logprobs(row).sum() / divisor(problem, row) for row in rows])
    found = problem.gradient(objective_of("rloo", aggregation=aggregation), beta=0.0)
    assert_same(found, problem.gradient_of(literal.sum()))


@SEEDS
@pytest.mark.parametrize("factor", [0.0, 0.3])
def test_the_negative_weight_scales_what_lies_below_the_baseline(seed: int, factor: float) -> None:
    """max(A, 0) + factor min(A, 0) times log pi, with PPO's clip and, in the family, with the KL in A."""
    problem, advantage = far_problem(seed), centred(far_problem(seed), far_problem(seed).reward, deviation=True)
    terms = [
        (factor if advantage[row] < 0 else 1.0) * ppo(rho(problem, row), advantage[row]).mean()
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


def test_as_few_tokens_go_as_bring_the_second_moment_below_its_limit() -> None:
    squares = torch.tensor([0.5, 0.01, 0.3, 0.02], dtype=torch.float64)
    assert second_moment_cut(squares, 1.0) == 0.5
    assert second_moment_cut(squares, 0.2) == pytest.approx(0.3)  # (0.01 + 0.02 + 0.3) / 3 = 0.11
    assert second_moment_cut(squares, 0.105) == pytest.approx(0.02)
    assert second_moment_cut(squares, 0.001) < 0
    assert second_moment_cut(torch.zeros(4), 0.04) == 0.0  # on-policy nothing goes


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


@pytest.mark.parametrize("preset", ON_POLICY)
def test_on_policy_nothing_is_bounded(preset: str) -> None:
    problem = make_problem(0, sizes=SIZES, drift=0.0)
    assert problem.loss(objective_of(preset), beta=0.0)[1]["clipped_share"] == 0.0


@pytest.mark.parametrize("preset", BASELINES)
def test_a_ratio_without_bounds_gives_a_finite_gradient(preset: str) -> None:
    problem = make_problem(1, sizes=SIZES)
    problem.sampler[0][:] -= 1e4
    problem.reward[:4] = 0.5  # also in a group whose advantages are all 0
    assert problem.gradient(objective_of(preset), beta=BETA).isfinite().all()


@pytest.mark.parametrize("preset", sorted(set(BASELINES) - {"reinforce"}))
def test_a_group_of_one_and_a_group_of_equal_rewards_teach_nothing(preset: str) -> None:
    problem = make_problem(2, sizes=(1, 4, 3))
    problem.reward[1:5] = 1.0
    found = advantages(problem.sequences(), objective_of(preset, beta=0.1), beta=0.0)
    assert found[:5].abs().max() < 1e-9
    assert found[5:].abs().max() > 0.1
    spread = reward_spread(problem.reward, problem.group)
    deviation = float(problem.reward[5:].std()) / 3  # the other two groups have none
    assert spread == pytest.approx({"reward_std": deviation, "frac_reward_zero_std": 2 / 3})


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
