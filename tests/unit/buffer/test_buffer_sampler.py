"""The sampler draws what its docstring says, checked against exact probabilities with chi-square tests.

A batch of many slots over one prompt is as many independent draws of a group. `big_prompt` says which way a prompt is
drawn from: 512 looks at all its rollouts, 2 uses its tree.
"""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from tba_buffer.index import priorities
from tba_buffer.index.log import Publication
from tba_buffer.index.priorities import log_probabilities
from tba_buffer.index.rollout_index import Index
from tba_buffer.sampling import prompt_choice
from tba_buffer.sampling.mop import draw_slots

from tba.versions import PolicyVersion
from tests.support.chi_square import assert_follows
from tests.support.index_values import (
    Item,
    index_of,
    make_added,
    make_evicted,
    make_index,
    make_rescored,
    make_sampling,
)

BOTH_WAYS = pytest.mark.parametrize("big_prompt", [512, 2])
V1, V2 = (PolicyVersion(1, step) for step in (4, 8))


def softmax(rewards, inverse_temperature: float, uniform_share: float = 0.0) -> np.ndarray:
    """Compute softmax by its definition, in plain float64."""
    logits = inverse_temperature * np.array(rewards, dtype=float)
    weights = np.exp(logits - logits.max())
    return (1 - uniform_share) * weights / weights.sum() + uniform_share / len(weights)


def sequence_probabilities(p: np.ndarray, size: int, *, replacement: bool) -> dict[tuple[int, ...], float]:
    """Probability of each ordered group of `size` of the items with probabilities p."""
    if replacement:
        return {group: float(np.prod(p[list(group)])) for group in product(range(len(p)), repeat=size)}
    result = {}
    for group in permutations(range(len(p)), size):
        probability = 1.0
        for place, item in enumerate(group):
            left = np.delete(p, group[:place]).sum()
            probability *= p[item] / left if left > 0 else 0.0
        result[group] = float(probability)
    return result


def assert_groups_follow(rows: np.ndarray, expected: dict[tuple[int, ...], float]) -> None:
    """Ordered groups, rows [N, K], follow exact probabilities."""
    cells = {group: number for number, group in enumerate(expected)}
    observed = np.bincount([cells[tuple(group)] for group in rows.tolist()], minlength=len(cells))
    assert_follows(observed, np.array(list(expected.values())))


def draw_groups(index: Index, num: int, seed: int = 0, **settings) -> np.ndarray:
    """Rows [num, K] of independent groups; the index has one prompt."""
    slots = draw_slots(index, make_sampling(prompts_per_batch=num, **settings), seed)
    return np.array([slot.rows for slot in slots])


def check_groups(rewards: list[float], big_prompt: int, beta: float, share: float = 0.0, size: int = 2) -> None:
    """Groups of rollouts with these rewards follow the mixture at an inverse temperature `beta` exactly."""
    index, p = index_of([rewards], big_prompt=big_prompt), softmax(rewards, beta, share)
    rows = draw_groups(index, 5000, group_size=size, inverse_temperature=beta, uniform_share=share)
    assert_groups_follow(rows, sequence_probabilities(p, size, replacement=False))


@BOTH_WAYS
@pytest.mark.parametrize(
    ("rewards", "inverse_temperature", "uniform_share"),
    [
        ([0.0, 0.5, 1.0, 2.0], 0.0, 0.0),
        ([0.0, 0.5, 1.0, 2.0], 1.5, 0.0),
        ([0.0, 0.5, 1.0, 2.0], 1.5, 0.2),
        ([0.0, 0.5, 1.0, 2.0], 1.5, 1.0),
        ([-7.0, -6.5, -6.0, -5.5, -5.5], 0.8, 0.05),
        ([-1e6, 3.0, 3.0 + 1e-6, 3.0 - 1e-6], 1e6, 0.0),
        ([-1e6, 3.0, 3.0 + 1e-6, 3.0 - 1e-6], 1e6, 0.3),
    ],
)
def test_groups_of_two_follow_the_mixture(
    rewards: list[float], inverse_temperature: float, uniform_share: float, big_prompt: int
) -> None:
    check_groups(rewards, big_prompt, inverse_temperature, uniform_share)


@BOTH_WAYS
def test_groups_of_three_without_replacement_include_each_rollout_as_often_as_they_should(big_prompt: int) -> None:
    rewards = [0.0, 1.0, 1.0, 2.0, 3.0]
    rows = draw_groups(index_of([rewards], big_prompt=big_prompt), 4000, group_size=3, inverse_temperature=1.0)
    expected = sequence_probabilities(softmax(rewards, 1.0), 3, replacement=False)
    assert_groups_follow(rows, expected)
    included = np.zeros(5)
    for group, probability in expected.items():
        included[list(group)] += probability / 3
    spread = np.random.default_rng(0).integers(0, 3, len(rows))  # one of each group: independent
    assert_follows(np.bincount(rows[np.arange(len(rows)), spread], minlength=5), included)


@BOTH_WAYS
def test_one_rollout_with_nearly_all_the_weight_leaves_the_rest_to_the_others(big_prompt: int) -> None:
    """Independent draws would repeat it thousands of times; the draw must still end, and stay exact."""
    check_groups([12.0, 0.0, 0.0, 0.7, 0.0], big_prompt, 1.0, size=3)


def test_a_prompt_with_many_rollouts_is_drawn_by_the_same_probabilities() -> None:
    values, sizes = np.array([-1.0, 0.0, 0.5, 1.0]), [400, 300, 200, 100]
    rewards = np.random.default_rng(1).permutation(np.repeat(values, sizes))
    index = index_of([rewards.tolist()])
    p = softmax(rewards, 2.0, 0.1)
    p_class = np.array([p[rewards == value].sum() for value in values])
    p_each = p_class / sizes
    rows = draw_groups(index, 5000, inverse_temperature=2.0, uniform_share=0.1)
    classes = np.searchsorted(values, rewards[rows])
    expected = {
        (a, b): p_class[a] * p_each[b] * (sizes[b] - (a == b)) / (1 - p_each[a]) for a, b in product(range(4), repeat=2)
    }
    assert_groups_follow(classes, expected)
    assert_follows(np.bincount(rows[:, 0], minlength=1000), p)


def test_the_tree_stays_exact_while_rollouts_come_go_and_change() -> None:
    rewards = dict(enumerate([0.0, 1.0, 2.0, 0.5, 1.5, 3.0], start=1))
    index = index_of([list(rewards.values())], big_prompt=2)
    draw_groups(index, 1, inverse_temperature=1.0)
    index.apply(make_evicted(7, [2, 6]))  # the best one is gone
    index.apply(make_rescored(8, {1: Item(reward=1.2), 3: Item(status="pending")}))
    index.apply(make_added(9, [Item(reward=2.5), Item(status="failed"), Item(reward=0.1)]))
    left = {1: 1.2, 4: 0.5, 5: 1.5, 9: 2.5, 11: 0.1}
    rows = draw_groups(index, 4000, inverse_temperature=1.0)
    positions = index.column("position", rows.ravel()).reshape(rows.shape)
    numbers = np.searchsorted(list(left), positions)
    p = softmax(list(left.values()), 1.0)
    assert_groups_follow(numbers, sequence_probabilities(p, 2, replacement=False))


def test_whole_number_weights_are_corrected_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two bits instead of 38, nearly everything depends on the correction."""
    monkeypatch.setattr(priorities, "_SCALE", 4.0)
    check_groups([0.0, 0.3, 0.9, 1.1, -2.0], 2, 1.3, 0.1)


@pytest.mark.parametrize("inverse_temperature", [1e3, 1e6, 1e308])
@BOTH_WAYS
def test_any_inverse_temperature_draws_the_best_first(inverse_temperature: float, big_prompt: int) -> None:
    for rewards in ([1.0, 2.0, 3.0, 2.5], [-1e15, 1e15, 0.0], [-5.0, -4.0, -6.0], [1e-300, 2e-300]):
        index = index_of([rewards], big_prompt=big_prompt)
        rows = draw_groups(index, 20, group_size=len(rewards), inverse_temperature=inverse_temperature)
        assert all(len(set(group)) == len(rewards) for group in rows.tolist())
        if inverse_temperature * min(np.diff(np.sort(rewards)).min(), 1e300 / inverse_temperature) > 100:
            assert (rows == np.argsort(rewards)[::-1]).all()  # every column


@pytest.mark.parametrize("inverse_temperature", [1e3, 1e16, 1e300, 1e308])
@BOTH_WAYS
def test_ties_are_broken_uniformly_at_any_inverse_temperature(inverse_temperature: float, big_prompt: int) -> None:
    rewards = [1.0] + [0.0] * 7
    index = index_of([rewards], big_prompt=big_prompt)
    rows = draw_groups(index, 4000, group_size=4, inverse_temperature=inverse_temperature)
    assert_groups_follow(rows, {(0, *rest): 1 / 210 for rest in permutations(range(1, 8), 3)})


def test_ties_are_broken_uniformly_where_only_the_best_few_of_many_are_put_in_order() -> None:
    index = index_of([[1.0] + [0.0] * 40])
    rows = draw_groups(index, 8000, group_size=3, inverse_temperature=1e16)
    assert (rows[:, 0] == 0).all()
    for column in (1, 2):
        assert_follows(np.bincount(rows[:, column] - 1, minlength=40), np.full(40, 1 / 40))


def test_prompts_that_tie_are_chosen_uniformly_at_any_inverse_temperature() -> None:
    index = index_of([[1.0, 1.0]] + [[0.0, 0.0]] * 7)
    settings = make_sampling(prompts_per_batch=3, inverse_temperature=1e18, prioritise="across")
    triples = [[slot.prompt for slot in draw_slots(index, settings, seed)] for seed in range(1000)]
    assert_groups_follow(np.array(triples), {(0, *rest): 1 / 42 for rest in permutations(range(1, 8), 2)})


@pytest.mark.parametrize("inverse_temperature", [1e-300, 1e-20, 1e-3])
def test_a_tiny_inverse_temperature_is_nearly_uniform(inverse_temperature: float) -> None:
    check_groups([0.0, 0.5, 1.0, -1.0], 512, inverse_temperature)


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 1e3, 1e308])
@pytest.mark.parametrize("uniform_share", [0.0, 0.1, 1.0])
def test_probabilities_sum_to_one_for_extreme_rewards(inverse_temperature: float, uniform_share: float) -> None:
    for rewards in ([0.0, 1.0], [-1e308, 1e308, 0.0], [1e-300, -1e-300], [5.0, 5.0, 5.0]):
        log_p = log_probabilities(
            np.array(rewards), inverse_temperature=inverse_temperature, uniform_share=uniform_share
        )
        assert np.isfinite(log_p).all()
        assert np.exp(log_p).sum() == pytest.approx(1.0)


@BOTH_WAYS
def test_a_prompt_with_fewer_than_k_rollouts_is_drawn_with_replacement(big_prompt: int) -> None:
    rewards = [0.0, 1.0, 2.0]
    index = index_of([rewards], big_prompt=big_prompt)
    for most_on_policy_prob, p in ((0.0, softmax(rewards, 1.0)), (1.0, np.full(3, 1 / 3))):
        settings = make_sampling(
            prompts_per_batch=1500, group_size=4, inverse_temperature=1.0, most_on_policy_prob=most_on_policy_prob
        )
        slots = draw_slots(index, settings, seed=5)
        assert_groups_follow(np.array([slot.rows for slot in slots]), sequence_probabilities(p, 4, replacement=True))


@pytest.mark.parametrize("num_prompts", [6, 40])
def test_prompts_are_uniform_and_distinct_within_a_batch(num_prompts: int) -> None:
    """6 are few for 3 slots (a random order of all), 40 are many (independent draws)."""
    index = index_of([[0.0] * (2 + number % 3) for number in range(num_prompts)])
    batches = [
        [slot.prompt for slot in draw_slots(index, make_sampling(prompts_per_batch=3), seed)] for seed in range(1000)
    ]
    assert all(len(set(batch)) == 3 for batch in batches)
    for place in range(3):
        observed = np.bincount([batch[place] for batch in batches], minlength=num_prompts)
        assert_follows(observed, np.full(num_prompts, 1 / num_prompts))


def test_a_batch_with_more_slots_than_prompts_uses_every_prompt_equally_often() -> None:
    for prioritise in ("within", "across"):
        settings = make_sampling(prompts_per_batch=6, prioritise=prioritise)
        slots = draw_slots(index_of([[0.0, 1.0]] * 3), settings, seed=1)
        assert sorted(slot.prompt for slot in slots) == [0, 0, 1, 1, 2, 2]
        assert sorted(slot.prompt for slot in slots[:3]) == [0, 1, 2]


@BOTH_WAYS
@pytest.mark.parametrize(("inverse_temperature", "uniform_share"), [(0.0, 0.0), (1.0, 0.0), (1.0, 0.25), (1e6, 0.5)])
def test_across_prompts_follow_their_total_weight(
    inverse_temperature: float, uniform_share: float, big_prompt: int
) -> None:
    rewards = [[0.0, 1.0], [0.5, 0.5, 0.5], [-1.0, 2.0], [9.0], [0.0, 0.1, 0.2, 0.3]]
    index = index_of(rewards, big_prompt=big_prompt)
    drawable = [0, 1, 2, 4]  # prompt 3 has one rollout
    with np.errstate(over="ignore"):
        masses = [np.logaddexp.reduce(inverse_temperature * np.array(rewards[number])) for number in drawable]
    p = softmax(masses, 1.0, uniform_share)
    settings = make_sampling(
        prompts_per_batch=2, inverse_temperature=inverse_temperature, uniform_share=uniform_share, prioritise="across"
    )
    pairs = [[slot.prompt for slot in draw_slots(index, settings, seed)] for seed in range(1200)]
    assert_groups_follow(np.searchsorted(drawable, pairs), sequence_probabilities(p, 2, replacement=False))


def test_across_prompts_when_one_has_nearly_all_the_weight() -> None:
    masses = np.array([30.0, 0.0, 1.0, 0.0])
    index = index_of([[mass, mass] for mass in masses.tolist()])
    settings = make_sampling(prompts_per_batch=3, inverse_temperature=1.0, prioritise="across")
    triples = [[slot.prompt for slot in draw_slots(index, settings, seed)] for seed in range(600)]
    assert_groups_follow(np.array(triples), sequence_probabilities(softmax(masses, 1.0), 3, replacement=False))


def test_the_bound_for_big_prompts_is_corrected_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priorities, "_SCALE", 64.0)
    monkeypatch.setattr(prompt_choice, "MAX_EXCESS", 1.0)
    rewards = [[0.0, 0.1, 0.2, -3.0, -4.0], [1.0, -5.0, -5.0], [0.4, 0.4]]
    p = softmax([np.logaddexp.reduce(group) for group in rewards], 1.0)
    settings = make_sampling(inverse_temperature=1.0, prioritise="across")
    index = index_of(rewards, big_prompt=2)
    prompts = [draw_slots(index, settings, seed)[0].prompt for seed in range(2500)]
    assert_follows(np.bincount(prompts, minlength=3), p)


def test_across_prompts_follows_what_changes() -> None:
    index = index_of([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    settings = make_sampling(inverse_temperature=1.0, prioritise="across")
    draw_slots(index, settings, 0)
    index.apply(make_evicted(7, [5]))
    index.apply(make_rescored(8, {1: Item(reward=2.0)}))
    index.apply(make_added(9, [Item(prompt=70, reward=1.5), Item(prompt=70, reward=1.0)]))
    p = softmax([np.logaddexp.reduce(group) for group in ([2.0, 0.0], [1.0, 1.0], [1.5, 1.0])], 1.0)
    prompts = [draw_slots(index, settings, seed)[0].prompt for seed in range(2000)]
    assert_follows(np.bincount(np.searchsorted([0, 1, 70], prompts), minlength=3), p)


@pytest.mark.parametrize("min_distinct", [1, 2, 4])
def test_a_prompt_can_fill_a_slot_once_it_has_min_distinct_rollouts(min_distinct: int) -> None:
    index = index_of([[0.0] * number for number in range(6)], min_distinct=min_distinct)
    assert index.num_drawable == 6 - min_distinct
    for prioritise in ("within", "across"):
        settings = make_sampling(prompts_per_batch=4, prioritise=prioritise)
        drawn = {slot.prompt for seed in range(40) for slot in draw_slots(index, settings, seed)}
        assert drawn == set(range(min_distinct, 6))


def test_no_prompt_with_enough_rollouts_means_no_batch() -> None:
    for index in (index_of([[1.0], [2.0]]), make_index()):
        with pytest.raises(ValueError, match="2 scored rollouts"):
            draw_slots(index, make_sampling(), seed=0)


def test_a_slot_is_recent_with_probability_m() -> None:
    index = index_of([[0.0, 1.0]] * 50)
    settings = make_sampling(prompts_per_batch=10, most_on_policy_prob=0.3)
    slots = [slot for seed in range(300) for slot in draw_slots(index, settings, seed)]
    num_recent = sum(slot.source == "recent" for slot in slots)
    assert_follows(np.array([num_recent, len(slots) - num_recent]), np.array([0.3, 0.7]))
    assert not any(slot.fallback for slot in slots)


@BOTH_WAYS
def test_recent_by_arrival_is_uniform_whatever_the_reward(big_prompt: int) -> None:
    index = make_index(
        make_added(1, [Item(reward=50.0), Item(reward=3.0)]),
        Publication(3, V1),
        make_added(4, [Item(reward=0.0), Item(status="pending"), Item(reward=100.0)]),
        Publication(7, V2),
        make_added(8, [Item(reward=5.0), Item(reward=-9.0)]),
        big_prompt=big_prompt,
    )
    rows = draw_groups(index, 3000, most_on_policy_prob=1.0, inverse_temperature=10.0, uniform_share=0.1)
    numbers = np.searchsorted([2, 4, 5, 6], rows)
    assert_groups_follow(numbers, sequence_probabilities(np.full(4, 0.25), 2, replacement=False))
    assert set(np.unique(rows)) == {2, 4, 5, 6}


def test_recent_prompts_are_uniform_among_those_with_enough_recent_rollouts() -> None:
    old = [Item(prompt=prompt) for prompt in range(8) for _ in range(5)]
    new = [Item(prompt=prompt) for prompt in (1, 2, 2, 5, 5, 6, 6, 6)]
    index = make_index(make_added(1, old), Publication(41, V1), make_added(42, new), Publication(50, V2))
    slots = [draw_slots(index, make_sampling(most_on_policy_prob=1.0), seed)[0] for seed in range(1500)]
    assert all(slot.source == "recent" and slot.rows.min() >= 40 for slot in slots)
    observed = np.bincount([slot.prompt for slot in slots], minlength=8)
    assert_follows(observed, np.isin(np.arange(8), [2, 5, 6]) / 3)


SINGLES = [Item(prompt=prompt) for prompt in range(40)]


def test_slots_fall_back_when_the_recent_prompts_are_used_up_and_say_so() -> None:
    old, new = [Item(prompt=prompt) for prompt in range(10) for _ in range(2)], [Item(prompt=p) for p in (2, 2, 3, 3)]
    index = make_index(make_added(1, old), Publication(21, V1), make_added(22, new), Publication(26, V2))
    for prioritise in ("within", "across"):
        chosen = {"most_on_policy_prob": 1.0, "recent_shortage": "draw", "prioritise": prioritise}
        slots = draw_slots(index, make_sampling(prompts_per_batch=5, **chosen), seed=3)
        assert {slot.prompt for slot in slots if slot.source == "recent"} == {2, 3}
        assert [slot.fallback for slot in slots].count(True) == 3
        assert len({slot.prompt for slot in slots}) == 5


def test_with_m_1_a_batch_waits_for_recent_data_and_holds_nothing_else() -> None:
    old, new = [Item(prompt=prompt) for prompt in range(10) for _ in range(2)], [Item(prompt=p) for p in (2, 2, 3, 3)]
    events = [make_added(1, old), Publication(21, V1), make_added(22, new), Publication(26, V2)]
    index = make_index(*events)
    size = make_sampling().group_size

    def missing(index: Index, num_slots: int) -> int:
        return index.recent_missing(make_sampling(prompts_per_batch=num_slots, most_on_policy_prob=1.0))

    assert missing(index, 2) == 0
    assert missing(index, 5) == 3 * size  # three slots are without a prompt
    # rollouts for each slot, of two prompts: these are used again, and nothing old is drawn
    more = make_index(*events, make_added(27, [Item(prompt=2)] * (5 * size - 4)))
    assert missing(more, 5) == 0
    slots = draw_slots(more, make_sampling(prompts_per_batch=5, most_on_policy_prob=1.0), seed=3)
    assert {(slot.prompt, slot.source) for slot in slots} == {(2, "recent"), (3, "recent")}
    assert min(slot.rows.min() for slot in slots) >= 20
    # single rollouts of many prompts make no group
    single = make_index(make_added(1, old), Publication(21, V1), Publication(22, V2), make_added(23, SINGLES))
    assert missing(single, 2) == 2 * size
    # before the second publication all data is recent, however few prompts there are
    assert missing(make_index(make_added(1, old)), 20) == 0


def test_fewer_recent_rollouts_than_min_distinct_are_not_a_group() -> None:
    events = [
        make_added(1, [Item(prompt=at // 2) for at in range(4)]),
        Publication(5, V1),
        make_added(6, [Item()]),
        Publication(7, V2),
    ]
    slots = draw_slots(make_index(*events), make_sampling(most_on_policy_prob=1.0), seed=0)
    assert slots[0].fallback
    slots = draw_slots(make_index(*events, min_distinct=1), make_sampling(most_on_policy_prob=1.0), seed=0)
    assert (slots[0].source, slots[0].rows.tolist()) == ("recent", [4, 4])


def test_the_same_seed_draws_the_same_batch_and_another_seed_another_one() -> None:
    index = index_of([[0.0, 1.0, 2.0, 3.0]] * 20)
    settings = make_sampling(prompts_per_batch=8)
    first, again, other = (draw_slots(index, settings, seed) for seed in (7, 7, 8))
    assert [(s.prompt, s.rows.tolist()) for s in first] == [(s.prompt, s.rows.tolist()) for s in again]
    assert [(s.prompt, s.rows.tolist()) for s in first] != [(s.prompt, s.rows.tolist()) for s in other]
