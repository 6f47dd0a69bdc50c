"""The sampler draws what algorithm.md section 6 says, checked against exact probabilities with chi-square tests."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from tba_buffer.sampler import MopSettings, draw_slots, log_probabilities

P_MIN = 1e-4


class FakePool:
    """Rewards by prompt; rows are numbered prompt after prompt."""

    def __init__(self, rewards: list[list[float]]) -> None:
        self._rewards = np.array([reward for group in rewards for reward in group])
        self.counts = np.array([len(group) for group in rewards])
        self._ends = np.cumsum(self.counts)

    def rows(self, prompt: int) -> np.ndarray:
        return np.arange(self._ends[prompt] - self.counts[prompt], self._ends[prompt])

    def rewards(self, rows: np.ndarray) -> np.ndarray:
        return self._rewards[rows]


def make_settings(**changes: float) -> MopSettings:
    values: dict = {
        "prompts_per_batch": 1,
        "group_size": 2,
        "most_on_policy_prob": 0.0,
        "reward_inverse_temperature": 0.0,
        "uniform_share": 0.0,
    }
    return MopSettings(**{**values, **changes})


NOTHING = np.zeros(0, dtype=np.int64)


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Wilson-Hilferty approximation of the upper tail."""
    dof = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    z = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_the_same_seed_draws_the_same_batch_and_another_seed_another_one() -> None:
    pool = FakePool([[0.0, 1.0, 2.0, 3.0]] * 20)
    settings = make_settings(prompts_per_batch=8)
    first, again, other = (draw_slots(pool, NOTHING, NOTHING, settings, seed) for seed in (7, 7, 8))
    assert [(s.prompt, s.rows.tolist()) for s in first] == [(s.prompt, s.rows.tolist()) for s in again]
    assert [(s.prompt, s.rows.tolist()) for s in first] != [(s.prompt, s.rows.tolist()) for s in other]


def test_a_slot_is_recent_with_probability_m() -> None:
    pool = FakePool([[0.0, 1.0]] * 50)
    recent = np.arange(100)
    settings = make_settings(prompts_per_batch=10, most_on_policy_prob=0.3)
    slots = [s for seed in range(400) for s in draw_slots(pool, recent, recent // 2, settings, seed)]
    num_recent = sum(slot.source == "recent" for slot in slots)
    observed = np.array([num_recent, len(slots) - num_recent])
    assert chi_square_p(observed, np.array([0.3, 0.7]) * len(slots)) > P_MIN
    assert not any(slot.fallback for slot in slots)


def test_replay_pairs_follow_the_reward_softmax_without_replacement() -> None:
    rewards = np.array([0.0, 0.5, 1.0, 2.0])
    pool, settings = FakePool([rewards.tolist()]), make_settings(reward_inverse_temperature=1.5, uniform_share=0.2)
    p = 0.8 * np.exp(1.5 * rewards) / np.exp(1.5 * rewards).sum() + 0.2 / 4
    pairs = list(permutations(range(4), 2))
    expected = np.array([p[a] * p[b] / (1 - p[a]) for a, b in pairs])
    num = 6000
    drawn = [tuple(draw_slots(pool, NOTHING, NOTHING, settings, seed)[0].rows.tolist()) for seed in range(num)]
    observed = np.array([drawn.count(pair) for pair in pairs])
    assert observed.sum() == num
    assert chi_square_p(observed, expected * num) > P_MIN


def test_recent_rollouts_are_drawn_uniformly_whatever_their_reward() -> None:
    pool = FakePool([[0.0, 100.0, 5.0, 5.0, 9.0]])
    recent = np.array([1, 2, 3, 4])
    settings = make_settings(most_on_policy_prob=1.0, reward_inverse_temperature=10.0)
    drawn = np.concatenate(
        [draw_slots(pool, recent, np.zeros(4, dtype=np.int64), settings, seed)[0].rows for seed in range(3000)]
    )
    observed = np.bincount(drawn, minlength=5)
    assert observed[0] == 0
    assert chi_square_p(observed[1:], np.full(4, 1500.0)) > P_MIN


def test_prompts_are_uniform_and_distinct_within_a_batch() -> None:
    pool = FakePool([[0.0] * (2 + i) for i in range(6)])
    settings = make_settings(prompts_per_batch=3)
    batches = [[s.prompt for s in draw_slots(pool, NOTHING, NOTHING, settings, seed)] for seed in range(2000)]
    assert all(len(set(batch)) == 3 for batch in batches)
    observed = np.bincount(np.array(batches).ravel(), minlength=6)
    assert chi_square_p(observed, np.full(6, 1000.0)) > P_MIN


def test_a_batch_with_more_slots_than_prompts_uses_every_prompt_equally_often() -> None:
    pool = FakePool([[0.0, 1.0]] * 3)
    slots = draw_slots(pool, NOTHING, NOTHING, make_settings(prompts_per_batch=6), seed=1)
    assert sorted(slot.prompt for slot in slots) == [0, 0, 1, 1, 2, 2]


def test_slots_fall_back_when_the_recent_prompts_are_used_up_and_say_so() -> None:
    pool = FakePool([[0.0, 1.0]] * 10)
    settings = make_settings(prompts_per_batch=5, most_on_policy_prob=1.0)
    slots = draw_slots(pool, np.array([4, 5, 6, 7]), np.array([2, 2, 3, 3]), settings, seed=3)
    assert {slot.prompt for slot in slots if slot.source == "recent"} == {2, 3}
    assert [slot.fallback for slot in slots].count(True) == 3
    assert len({slot.prompt for slot in slots}) == 5


def test_one_recent_rollout_is_not_a_group() -> None:
    pool = FakePool([[0.0, 1.0]] * 2)
    slots = draw_slots(pool, np.array([0]), np.array([0]), make_settings(most_on_policy_prob=1.0), seed=0)
    assert slots[0].fallback


def test_a_prompt_with_fewer_than_k_rollouts_is_drawn_with_replacement_and_its_distinct_ones_are_counted() -> None:
    pool = FakePool([[0.0, 1.0, 2.0]])
    for most_on_policy_prob in (0.0, 1.0):
        settings = make_settings(group_size=8, most_on_policy_prob=most_on_policy_prob)
        (slot,) = draw_slots(pool, np.arange(3), np.zeros(3, dtype=np.int64), settings, seed=5)
        assert len(slot.rows) == 8
        assert slot.num_distinct == len(set(slot.rows.tolist())) <= 3


def test_a_prompt_with_k_rollouts_or_more_never_repeats_one() -> None:
    pool = FakePool([[0.0, 1.0, 1e6, -1e6, 3.0, 4.0]])
    settings = make_settings(group_size=6, reward_inverse_temperature=1e6)
    for seed in range(50):
        assert draw_slots(pool, NOTHING, NOTHING, settings, seed)[0].num_distinct == 6


def test_no_prompt_with_two_rollouts_means_no_batch() -> None:
    with pytest.raises(ValueError, match="fill a slot"):
        draw_slots(FakePool([[1.0], [2.0]]), NOTHING, NOTHING, make_settings(), seed=0)


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 1e3, 1e308])
@pytest.mark.parametrize("uniform_share", [0.0, 0.1, 1.0])
def test_probabilities_sum_to_one_for_extreme_rewards(inverse_temperature: float, uniform_share: float) -> None:
    for rewards in ([0.0, 1.0], [-1e308, 1e308, 0.0], [1e-300, -1e-300], [5.0, 5.0, 5.0]):
        log_p = log_probabilities(
            np.array(rewards), inverse_temperature=inverse_temperature, uniform_share=uniform_share
        )
        assert np.isfinite(log_p).all()
        assert np.exp(log_p).sum() == pytest.approx(1.0)
