"""The identities of the family (docs/algorithm.md), in float64, against formulas written out independently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tba_trainer.objectives import Objective, Tokens, Totals, advantages, objective_loss
from torch import Tensor

from tba.config.objective import PRESETS
from tests.support.objective_values import Problem, assert_same, make_problem, objective_of

BETA = 0.07
TB = objective_of("tb")
UNWEIGHTED = objective_of("tba_prime_unweighted")
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


def log_ratio(problem: Problem) -> Tensor:
    return problem.logprob() - problem.ref


def vargrad(problem: Problem, *, detach_log_z: bool, shift: float = 0.0, beta: float = BETA) -> Tensor:
    """arXiv 2503.18929, Eq. 5."""
    ratio = log_ratio(problem) + shift
    log_z = (problem.reward / beta - ratio).mean()
    log_z = log_z.detach() if detach_log_z else log_z
    return (log_z + ratio - problem.reward / beta).square().mean()


@SEEDS
def test_detaching_log_z_does_not_change_the_gradient(seed: int) -> None:
    problem = make_problem(seed)
    attached = problem.gradient_of(vargrad(problem, detach_log_z=False))
    detached = problem.gradient_of(vargrad(problem, detach_log_z=True))
    assert_same(attached, detached)
    assert_same(problem.gradient(TB, beta=BETA), BETA / 2 * attached)


@SEEDS
def test_a_constant_added_to_every_log_ratio_of_a_group_changes_nothing(seed: int) -> None:
    problem = make_problem(seed)
    loss, shifted = vargrad(problem, detach_log_z=True), vargrad(problem, detach_log_z=True, shift=17.0)
    assert float(((shifted - loss) / loss).detach().abs()) < 1e-6
    elsewhere = replace(problem, ref=problem.ref - 17.0)
    assert_same(elsewhere.gradient(TB, beta=BETA), problem.gradient(TB, beta=BETA))
    drifted = elsewhere.gradient(objective_of("tb", centre="none"), beta=BETA)
    assert not torch.allclose(drifted, problem.gradient(TB, beta=BETA))


@SEEDS
def test_behaviour_centring_adds_the_gradient_of_a_trust_region_on_the_common_drift(seed: int) -> None:
    problem = make_problem(seed)
    drift = (problem.logprob() - problem.sampler_logprob()).mean()
    trust_region = problem.gradient_of(BETA / 2 * drift.square())
    assert_same(problem.gradient(UNWEIGHTED, beta=BETA), problem.gradient(TB, beta=BETA) + trust_region)


@SEEDS
def test_on_policy_the_gradient_is_rloo_up_to_a_constant(seed: int) -> None:
    problem, k = make_problem(seed, drift=0.0), 6
    shaped = problem.reward - BETA * log_ratio(problem).detach()  # the KL is part of the reward
    others = (shaped.sum() - shaped) / (k - 1)
    rloo = problem.gradient_of(-((shaped - others) * problem.logprob()).mean())
    assert_same(problem.gradient(TB, beta=BETA), rloo * (k - 1) / k)
    assert_same(problem.gradient(objective_of("rloo", beta=BETA), beta=BETA), rloo)


@pytest.mark.parametrize("beta", [0.004, 0.07, 1.0])
def test_the_a_form_is_beta_over_two_times_the_raw_loss(beta: float) -> None:
    problem = make_problem(5)
    raw = vargrad(problem, detach_log_z=True, beta=beta)
    assert_same(problem.gradient(TB, beta=beta), beta / 2 * problem.gradient_of(raw))


def test_behaviour_centring_is_the_group_mean_under_the_behaviour_policy() -> None:
    problem = make_problem(4)
    centre = (problem.sampler_logprob() - problem.ref).mean()
    expected = problem.reward - problem.reward.mean() - BETA * (log_ratio(problem).detach() - centre)
    assert_same(advantages(problem.sequences(), UNWEIGHTED, beta=BETA), expected)


def test_beyond_the_age_limit_the_centre_is_theta() -> None:
    young, old = make_problem(6, age=32), make_problem(6, age=33)
    assert_same(old.gradient(UNWEIGHTED, beta=BETA), old.gradient(TB, beta=BETA))
    assert not torch.allclose(young.gradient(UNWEIGHTED, beta=BETA), young.gradient(TB, beta=BETA))


def test_in_a_group_of_mixed_age_only_the_young_are_centred_by_their_own_drift() -> None:
    problem = replace(make_problem(7), age=torch.tensor([0, 5, 33, 40, 2, 100]))
    young = problem.age <= 32
    tb, mixed = (advantages(problem.sequences(), o, beta=BETA) for o in (TB, UNWEIGHTED))
    drift = (problem.logprob().detach() - problem.sampler_logprob())[young].mean()
    assert torch.equal(mixed[~young], tb[~young])
    assert_same(mixed[young], tb[young] - BETA * drift)


def test_token_weights_are_clamped_ratios_without_gradient() -> None:
    problem = make_problem(8)
    problem.sampler[0][0] -= 50.0  # an outlier whose ratio is far above the clamp
    advantage = advantages(problem.sequences(), objective_of("tba_prime"), beta=BETA)
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(6):
        logprobs = problem.logprobs(row)
        weight = (logprobs.detach() - problem.sampler[row]).exp().clamp(max=8.0)
        expected = expected - (advantage[row] * weight * logprobs).sum() / 6
    assert_same(problem.gradient(objective_of("tba_prime"), beta=BETA), problem.gradient_of(expected))
    _, metrics = problem.loss(objective_of("tba_prime"), beta=BETA)
    assert metrics["clipped_share"] == pytest.approx(1 / int(problem.lengths.sum()))


def test_kimi_is_the_gradient_of_its_squared_error() -> None:
    """(r - mean r - beta log(pi / pi_beh))^2 / (2 beta), arXiv 2501.12599 with the mean reward for the partition."""
    problem = make_problem(9)
    ratio = problem.logprob() - problem.sampler_logprob()
    literal = (problem.reward - problem.reward.mean() - BETA * ratio).square().mean() / (2 * BETA)
    assert_same(problem.gradient(objective_of("kimi"), beta=BETA), problem.gradient_of(literal))


def test_tb_behaviour_is_tb_with_a_log_ratio_that_is_clamped_and_divided_by_the_age() -> None:
    problem = replace(make_problem(10), age=torch.tensor([0, 1, 2, 4, 16, 64]))
    problem.sampler[1][0] -= 30.0
    raw = problem.logprob().detach() - problem.sampler_logprob()
    ratio = raw.clamp(-10, 10) / torch.tensor([1, 1, 2, 4, 16, 64])
    expected = problem.reward - problem.reward.mean() - BETA * (ratio - ratio.mean())
    found = advantages(problem.sequences(), objective_of("tb_behaviour"), beta=BETA)
    assert_same(found, expected)
    assert float(raw.max()) > 10


def test_with_the_behaviour_as_anchor_the_behaviour_centre_is_none() -> None:
    problem = make_problem(12)
    kimi = advantages(problem.sequences(), objective_of("kimi"), beta=BETA)
    assert_same(advantages(problem.sequences(), objective_of("kimi", centre="behaviour"), beta=BETA), kimi)


KL = 0.11
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{preset: (preset, {"beta": KL}) for preset in PRESETS},
    "tba_prime, without negatives": ("tba_prime", {"negative_weight": 0.0}),
    "tb_behaviour, behaviour centre": ("tb_behaviour", {"centre": "behaviour"}),
}
every_objective = pytest.mark.parametrize("name", VARIANTS)
drifts, ages = st.sampled_from([0.0, 0.3, 1.5]), st.sampled_from([0, 3, 40])
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
problems = st.builds(make_problem, st.integers(0, 10_000), sizes=sizes, drift=drifts, age=ages)
few = settings(max_examples=15, deadline=None)


def named(name: str) -> Objective:
    preset, fields = VARIANTS[name]
    return objective_of(preset, **fields)


def close(left: torch.Tensor, right: torch.Tensor, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


@every_objective
@few
@given(problem=problems, seed=st.integers(0, 99), data=st.data())
def test_order_cuts_and_group_numbers_do_not_matter(name: str, problem: Any, seed: int, data: st.DataObject) -> None:
    objective, rng = named(name), np.random.default_rng(seed)
    if data.draw(st.booleans()):
        problem = replace(problem, reward=(problem.reward > 0).double())  # ties
    loss, metrics = problem.loss(objective, beta=KL)
    expected, advantage = (problem.gradient_of(loss), advantages(problem.sequences(), objective, beta=KL))

    order = rng.permutation(problem.num_rollouts)
    shuffled = problem.rows(order.tolist())
    close(advantages(shuffled.sequences(), objective, beta=KL), advantage[torch.tensor(order)])
    close(shuffled.gradient(objective, beta=KL), expected)

    renumbered = replace(problem, group=torch.tensor(rng.permutation(50) * 1000)[problem.group])
    close(renumbered.gradient(objective, beta=KL), expected)

    num_cuts = int(rng.integers(1, problem.num_rollouts + 1))
    cuts = [cut.tolist() for cut in np.array_split(order, num_cuts)]
    cut_loss, cut_metrics = problem.loss(objective, beta=KL, cuts=cuts)
    close(problem.gradient_of(cut_loss), expected)
    assert cut_metrics == pytest.approx(metrics, rel=1e-8, abs=1e-10)


@every_objective
@few
@given(problem=problems, shift=st.floats(-50, 50))
def test_one_constant_on_every_reward_of_the_batch_changes_nothing(name: str, problem: Any, shift: float) -> None:
    shifted = replace(problem, reward=problem.reward + shift)
    close(shifted.gradient(named(name), beta=KL), problem.gradient(named(name), beta=KL), rtol=1e-6, atol=1e-8)


SHIFTABLE = [name for name in VARIANTS if named(name).needs_complete_groups and not named(name).clamps_tokens]


@pytest.mark.parametrize("name", SHIFTABLE)
@few
@given(problem=problems, shift=st.floats(-50, 50))
def test_one_constant_on_every_reference_log_prob_changes_nothing(name: str, problem: Any, shift: float) -> None:
    shifted = replace(problem, ref=problem.ref + shift)
    found, expected = (advantages(each.sequences(), named(name), beta=KL) for each in (shifted, problem))
    close(found, expected, rtol=1e-6, atol=1e-8)


@every_objective
@few
@given(problem=problems)
def test_other_groups_are_of_no_account_unless_the_objective_says_so(name: str, problem: Any) -> None:
    objective = named(name)
    together = advantages(problem.sequences(), objective, beta=KL)
    groups = [problem.rows((problem.group == number).nonzero()[:, 0].tolist()) for number in problem.group.unique()]
    alone = torch.cat([advantages(group.sequences(), objective, beta=KL) for group in groups])
    if not objective.needs_complete_batch:
        close(together, alone)


@every_objective
@few
@given(problem=problems)
def test_what_an_objective_says_it_does_not_read_it_does_not_read(name: str, problem: Any) -> None:
    objective = named(name)
    sequences = problem.sequences()
    expected = advantages(sequences, objective, beta=KL)
    elsewhere = sequences.logprob - 3.0 * torch.arange(1.0, 1.0 + problem.num_rollouts)
    if not objective.reads_theta:
        close(advantages(replace(sequences, logprob=elsewhere), objective, beta=KL), expected)
    elif not objective.needs_complete_groups:
        for row in range(problem.num_rollouts):
            only = elsewhere.clone()
            only[row] = sequences.logprob[row]
            found = advantages(replace(sequences, logprob=only), objective, beta=KL)
            close(found[row], expected[row])


@every_objective
def test_a_micro_batch_without_rollouts_adds_nothing_and_has_a_gradient(name: str) -> None:
    """A rank that has nothing left to do gets such a micro-batch."""
    theta = torch.zeros(3, requires_grad=True)
    nothing, none = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    of_no_token = {"sampler_logprobs": none, "trainer_logprobs": none, "row": nothing, "num_untrained": nothing}
    tokens = Tokens(logprobs=theta[nothing], num_rows=0, **of_no_token)
    totals = Totals(num_rollouts=4, num_tokens=9, num_groups=2)
    loss, metrics, weights = objective_loss(tokens, torch.zeros(0), named(name), totals=totals)
    loss.backward()
    assert theta.grad is not None
    assert not theta.grad.any()
    assert (set(map(float, metrics.values())), len(weights)) == ({0.0}, 0)
