"""What holds for every objective: order, cuts into micro-batches and group numbers are of no account."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tba_trainer.objectives import Objective, Tokens, Totals, advantages, objective_loss

from tba.config import ObjectiveSection
from tests.support.objective_values import make_problem, objective_of

BETA = 0.07
PRESETS = get_args(ObjectiveSection.model_fields["preset"].annotation)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{preset: (preset, {"beta": BETA}) for preset in PRESETS},
    "tb, length-normalised": ("tb", {"length_normalise": True}),
    "tba_prime, length-normalised": ("tba_prime", {"length_normalise": True}),
    "tb_behaviour, behaviour centre": ("tb_behaviour", {"centre": "behaviour"}),
}
every_objective = pytest.mark.parametrize("name", VARIANTS)
problems = st.builds(
    make_problem,
    st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    drift=st.sampled_from([0.0, 0.3, 1.5]),
    age=st.sampled_from([0, 3, 40]),
)
few = settings(max_examples=15, deadline=None)


def named(name: str) -> Objective:
    preset, fields = VARIANTS[name]
    return objective_of(preset, **fields)


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


@every_objective
@few
@given(problem=problems, seed=st.integers(0, 99), data=st.data())
def test_order_cuts_and_group_numbers_are_of_no_account(
    name: str, problem: Any, seed: int, data: st.DataObject
) -> None:
    objective, rng = named(name), np.random.default_rng(seed)
    if data.draw(st.booleans()):
        problem = replace(problem, reward=(problem.reward > 0).double())  # ties
    loss, metrics = problem.loss(objective, beta=BETA)
    expected, advantage = problem.gradient_of(loss), advantages(problem.sequences(), objective, beta=BETA)

    order = rng.permutation(problem.num_rollouts)
    shuffled = problem.rows(order.tolist())
    close(advantages(shuffled.sequences(), objective, beta=BETA), advantage[torch.tensor(order)])
    close(shuffled.gradient(objective, beta=BETA), expected)

    renumbered = replace(problem, group=torch.tensor(rng.permutation(50) * 1000)[problem.group])
    close(renumbered.gradient(objective, beta=BETA), expected)

    num_cuts = int(rng.integers(1, problem.num_rollouts + 1))
    cuts = [cut.tolist() for cut in np.array_split(order, num_cuts)]
    cut_loss, cut_metrics = problem.loss(objective, beta=BETA, cuts=cuts)
    close(problem.gradient_of(cut_loss), expected)
    assert cut_metrics == pytest.approx(metrics, rel=1e-8, abs=1e-10)


@every_objective
@few
@given(problem=problems, shift=st.floats(-50, 50))
def test_one_constant_on_every_reward_of_the_batch_changes_nothing(name: str, problem: Any, shift: float) -> None:
    shifted = replace(problem, reward=problem.reward + shift)
    torch.testing.assert_close(
        shifted.gradient(named(name), beta=BETA), problem.gradient(named(name), beta=BETA), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("name", [name for name in VARIANTS if named(name).needs_complete_groups])
@few
@given(problem=problems, shift=st.floats(-50, 50))
def test_one_constant_on_every_reference_log_prob_changes_nothing(name: str, problem: Any, shift: float) -> None:
    shifted = replace(problem, ref=problem.ref + shift)
    if named(name).ratio_per_token:  # there the constant is one per token
        shifted = replace(problem, ref=problem.ref + shift * problem.lengths.double())
    torch.testing.assert_close(
        advantages(shifted.sequences(), named(name), beta=BETA),
        advantages(problem.sequences(), named(name), beta=BETA),
        rtol=1e-6,
        atol=1e-8,
    )


@every_objective
@few
@given(problem=problems)
def test_other_groups_are_of_no_account_unless_the_objective_says_so(name: str, problem: Any) -> None:
    objective = named(name)
    together = advantages(problem.sequences(), objective, beta=BETA)
    alone = torch.cat(
        [
            advantages(
                problem.rows((problem.group == number).nonzero()[:, 0].tolist()).sequences(), objective, beta=BETA
            )
            for number in problem.group.unique()
        ]
    )
    if not objective.needs_complete_batch:
        close(together, alone)


@every_objective
@few
@given(problem=problems)
def test_what_an_objective_says_it_does_not_read_it_does_not_read(name: str, problem: Any) -> None:
    objective = named(name)
    sequences = problem.sequences()
    expected = advantages(sequences, objective, beta=BETA)
    elsewhere = sequences.logprob - 3.0 * torch.arange(1.0, 1.0 + problem.num_rollouts)
    if not objective.reads_theta:
        close(advantages(replace(sequences, logprob=elsewhere), objective, beta=BETA), expected)
    elif not objective.needs_complete_groups:
        for row in range(problem.num_rollouts):
            only = elsewhere.clone()
            only[row] = sequences.logprob[row]
            found = advantages(replace(sequences, logprob=only), objective, beta=BETA)
            close(found[row], expected[row])


@every_objective
def test_a_micro_batch_without_rollouts_adds_nothing_and_has_a_gradient(name: str) -> None:
    """What a rank gets that has nothing left to do."""
    theta = torch.zeros(3, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.long)
    tokens = Tokens(logprobs=theta[nothing], sampler_logprobs=torch.zeros(0), row=nothing, num_rows=0)
    totals = Totals(num_rollouts=4, num_tokens=9, num_groups=2)
    loss, metrics = objective_loss(tokens, torch.zeros(0), named(name), totals=totals)
    loss.backward()
    assert theta.grad is not None
    assert not theta.grad.any()
    assert set(metrics.values()) == {0.0}
