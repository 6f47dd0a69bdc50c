"""The decisive objectives converge on the enumerable task; docs/algorithm.md has the whole table.

Behaviours that are wide converge in few steps; the stale one, which hardly visits some outcomes, takes more.
"""

from __future__ import annotations

from typing import Any

import pytest

from tba.config import ObjectiveSection
from tests.support.optimum_task import BETA, Behaviour, Case, converge


def distance(preset: str, behaviour: Behaviour, *, age: int = 0, num_steps: int = 250, **fields: Any) -> float:
    """Total variation to pi*."""
    section = ObjectiveSection.model_validate({"preset": preset, "beta": BETA, **fields})
    return converge(section, Case(behaviour, age), num_steps=num_steps)


@pytest.mark.parametrize(
    ("behaviour", "age", "num_steps"),
    [("on-policy", 0, 250), ("lag", 16, 250), ("uniform", 8, 250), ("stale", 64, 800)],
)
def test_tb_converges_to_the_optimum_under_any_behaviour(behaviour: Behaviour, age: int, num_steps: int) -> None:
    assert distance("tb", behaviour, age=age, num_steps=num_steps) < 0.02


def test_behaviour_centring_is_biased_under_a_fixed_stale_behaviour_up_to_its_age_limit() -> None:
    unweighted = "tba_prime_unweighted"
    assert distance(unweighted, "on-policy", anchor="fixed") < 0.02
    assert distance(unweighted, "stale", age=32, anchor="fixed") > 0.1
    assert distance(unweighted, "stale", age=33, num_steps=800, anchor="fixed") < 0.02


@pytest.mark.parametrize("preset", ["reinforce", "grpo", "ppo_clip"])
def test_without_a_kl_a_baseline_goes_past_the_optimum(preset: str) -> None:
    assert distance(preset, "on-policy", beta=0.0) > 0.3


@pytest.mark.parametrize("preset", ["kimi", "tb_behaviour"])
def test_with_the_behaviour_as_anchor_the_optimum_is_another_one(preset: str) -> None:
    """Their KL is a trust region, which moves along: on-policy there is none."""
    assert distance(preset, "on-policy") > 0.3


def test_a_kl_in_the_reward_makes_rloo_tb() -> None:
    assert distance("rloo", "uniform", age=8) < 0.02


def test_online_dpo_has_another_optimum_than_its_kl_says() -> None:
    assert distance("online_dpo", "uniform", age=8) > 0.1
