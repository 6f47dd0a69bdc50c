"""The choice and order of visited prompts, and how often searchers ask for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.prompts.catalog import (
    Catalog,
    SelectionSettings,
    VisitCursor,
    VisitOrder,
    candidate_offsets,
    choose_by_posterior,
    nearest_draws,
    thompson_draws,
)
from tba_buffer.prompts.leases import MAX_POLLS_PER_S, MAX_RETRY_S, MIN_RETRY_S, PollBackoff

from tests.support.buffer import make_prompts, make_recipe
from tests.support.index_values import make_index

# ---- Posterior selection --------------------------------------------------------------------------------------------


P_MIN = 1e-4
SETTINGS = SelectionSettings(target=0.5, num_candidates=8)


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Wilson-Hilferty approximation of the upper tail."""
    dof = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    z = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
    return 0.5 * math.erfc(z / math.sqrt(2))


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def beta_tail(a: int, b: int, edges: np.ndarray) -> np.ndarray:
    """P(X <= edge) of Beta(a, b) for whole a, b: the chance of a or more successes in a + b - 1 trials."""
    trials = a + b - 1
    return np.array(
        [sum(math.comb(trials, j) * x**j * (1 - x) ** (trials - j) for j in range(a, trials + 1)) for x in edges]
    )


@pytest.mark.parametrize(("count", "success"), [(0, 0), (8, 0), (8, 8), (20, 5)])
def test_draws_are_of_the_beta_posterior(count: int, success: int) -> None:
    num, edges = 20_000, np.linspace(0, 1, 21)
    draws = thompson_draws(np.full(num, count), np.full(num, success), np.random.default_rng(1))
    expected = num * np.diff(beta_tail(1 + success, 1 + count - success, edges))
    observed = np.histogram(draws, edges)[0]
    wide = expected >= 5
    observed = np.append(observed[wide], observed[~wide].sum() + 1e-9)
    expected = np.append(expected[wide], expected[~wide].sum() + 1e-9)
    assert chi_square_p(observed, expected) > P_MIN


@pytest.mark.parametrize(("num_train", "num"), [(5, 5), (50, 20), (3, 24), (1, 7)])
def test_candidates_are_uniform_and_different_where_they_can_be(num_train: int, num: int) -> None:
    rng, counts = np.random.default_rng(2), np.zeros(num_train)
    for _ in range(2000):
        offsets = candidate_offsets(num_train, num, rng)
        assert len(offsets) == num
        assert num > num_train or len(set(offsets.tolist())) == num
        counts += np.bincount(offsets, minlength=num_train)
    if 1 < num_train != num:
        # without replacement the counts vary less than multinomial ones; the test is only the more lenient for it
        assert chi_square_p(counts, np.full(num_train, counts.sum() / num_train)) > P_MIN


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0, 1), st.integers(1, 30))
def test_no_draw_that_is_left_out_is_nearer_than_one_that_is_taken(draws: list[float], target: float, num: int) -> None:
    taken = nearest_draws(np.array(draws), target, num)
    assert len(taken) == min(num, len(draws)) == len(set(taken.tolist()))
    distances = np.abs(np.array(draws) - target)
    assert np.all(np.diff(distances[taken]) >= 0)
    left = np.setdiff1d(np.arange(len(draws)), taken)
    assert not len(left) or distances[left].min() >= distances[taken].max()


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(1, 10),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=60),
    st.integers(0, 2**32),
)
def test_every_visit_gets_a_train_prompt_and_the_same_seed_the_same_ones(
    num_train: int, num: int, num_candidates: int, tried: list[tuple[int, int]], seed: int
) -> None:
    train_numbers = np.arange(num_train) * 2 + 1  # every second prompt is held out
    counts = numbers([max(pair) for pair in tried])
    successes = numbers([min(pair) for pair in tried])
    settings = SelectionSettings(target=0.5, num_candidates=num_candidates)
    first, again = (
        choose_by_posterior(train_numbers, counts, successes, num, settings, np.random.default_rng(seed))
        for _ in range(2)
    )
    assert first.tolist() == again.tolist()
    assert len(first) == num
    assert first.min() >= 0
    assert first.max() < num_train
    assert num_candidates * num > num_train or len(set(first.tolist())) == num


def test_the_counts_are_those_of_the_train_prompts_own_numbers() -> None:
    """Number 1 (held out) looks perfect; number 2 is hopeless, number 3 is in the middle."""
    counts, successes = numbers([0, 2000, 2000, 2000]), numbers([0, 1000, 0, 1000])
    settings = SelectionSettings(target=0.5, num_candidates=2)
    chosen = [
        choose_by_posterior(numbers([2, 3]), counts, successes, 1, settings, np.random.default_rng(seed))[0]
        for seed in range(50)
    ]
    assert set(chosen) == {1}


def test_an_untried_prompt_beats_hopeless_and_mastered_ones() -> None:
    counts, successes = numbers([100, 100, 0]), numbers([0, 100, 0])
    settings = SelectionSettings(target=0.5, num_candidates=3)
    chosen = [
        choose_by_posterior(np.arange(3), counts, successes, 1, settings, np.random.default_rng(seed))[0]
        for seed in range(200)
    ]
    assert np.mean(np.array(chosen) == 2) > 0.9


def test_the_target_moves_the_choice() -> None:
    rates = np.linspace(0, 1, 11)
    counts, successes = np.full(11, 1000), np.round(1000 * rates).astype(np.int64)
    for target in (0.2, 0.5, 0.8):
        settings = SelectionSettings(target=target, num_candidates=11)
        chosen = [
            choose_by_posterior(np.arange(11), counts, successes, 1, settings, np.random.default_rng(seed))[0]
            for seed in range(50)
        ]
        assert np.mean(rates[chosen]) == pytest.approx(target, abs=0.02)


def share_in_the_middle(selection: SelectionSettings | None, seed: int) -> float:
    """Share of the last half of 4,000 visits (8 rollouts each, 16 at a time) to prompts with success rate 0.25 to 0.75.

    500 prompts with fixed rates from Beta(0.3, 0.3): most are nearly hopeless or nearly mastered.
    """
    rng = np.random.default_rng(seed)
    rates = rng.beta(0.3, 0.3, size=500)
    is_middle = (rates >= 0.25) & (rates <= 0.75)
    counts, successes = np.zeros(500, dtype=np.int64), np.zeros(500, dtype=np.int64)
    num_middle = 0
    for request in range(250):
        chosen = (
            rng.integers(0, 500, size=16)
            if selection is None
            else choose_by_posterior(np.arange(500), counts, successes, 16, selection, rng)
        )
        num_middle += int(is_middle[chosen].sum()) if request >= 125 else 0
        np.add.at(counts, chosen, 8)
        np.add.at(successes, chosen, rng.binomial(8, rates[chosen]))
    return num_middle / (125 * 16)


@pytest.mark.parametrize("seed", range(3))
def test_visits_converge_on_prompts_that_succeed_about_half_the_time(seed: int) -> None:
    uniform, posterior = share_in_the_middle(None, seed), share_in_the_middle(SETTINGS, seed)
    assert uniform < 0.35
    assert posterior > 0.85


def test_a_recipe_chooses_epochs_by_default() -> None:
    assert SelectionSettings.of(make_recipe()) is None
    assert SelectionSettings.of(make_recipe(data={"selection": "posterior"})) == SelectionSettings()


# ---- The order of visits is a function of the cursor, the seed and the prompts --------------------------------------


def place(cursor: str) -> VisitCursor:
    return VisitCursor.parse(cursor.encode(), num_train=9)


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    catalog, index = Catalog.__new__(Catalog), make_index()
    catalog.train = make_prompts(7)
    order = VisitOrder(catalog, make_recipe())
    visits = order.next(None, 21, index)
    epochs = [[visit.prompt_id for visit in visits[at : at + 7]] for at in (0, 7, 14)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({visit.visit_id for visit in visits}) == 21
    again = VisitOrder(catalog, make_recipe())
    assert [v.prompt_id for v in again.next(place(visits[9].cursor_after), 11, index)] == [
        v.prompt_id for v in visits[10:]
    ]
    catalog.train = make_prompts(9)
    assert [v.prompt_id for v in order.next(place(visits[9].cursor_after), 4, index)] == [
        v.prompt_id for v in visits[10:14]
    ]
    assert {v.prompt_id for v in order.next(place(visits[13].cursor_after), 9, index)} == {
        f"train-{i}" for i in range(9)
    }


@pytest.mark.parametrize(
    "cursor", [b"", b"junk", b"\xff", b"0:1", b"0:1:2:3", b"-1:0:9", b"0:5:4", b"0:0:10", b"0:-1:9"]
)
def test_a_damaged_cursor_is_no_place(cursor: bytes) -> None:
    with pytest.raises(ValueError):
        VisitCursor.parse(cursor, num_train=9)


# ---- Searchers that wait ask less often when they are many ----------------------------------------------------------


def polls_per_s(backoff: PollBackoff, names: list[str], during_s: float = 20.0) -> float:
    """Simulate searchers that ask at the given times; return the requests per second in the last half of the time."""
    next_at_s = dict.fromkeys(names, 0.0)
    num_asks = 0
    while (now_s := min(next_at_s.values())) < during_s:
        name = min(next_at_s, key=lambda one: next_at_s[one])
        next_at_s[name] = now_s + backoff.record_empty(name, now_s)
        num_asks += now_s >= during_s / 2
    return num_asks / (during_s / 2)


def test_a_few_searchers_ask_often_and_hundreds_share_the_same_rate() -> None:
    assert polls_per_s(PollBackoff(), [f"s{i}" for i in range(4)]) == 4 / MIN_RETRY_S
    for num in (50, 256):
        rate = polls_per_s(PollBackoff(), [f"s{i}" for i in range(num)])
        assert 0.7 * MAX_POLLS_PER_S < rate < 1.3 * MAX_POLLS_PER_S


def test_searchers_that_got_work_or_are_gone_no_longer_count() -> None:
    backoff = PollBackoff()
    for i in range(256):
        backoff.record_empty(f"s{i}", 0.0)
    assert backoff.record_empty("s0", 0.1) == 2.56
    for i in range(1, 256):
        backoff.record_served(f"s{i}")
    assert backoff.record_empty("s0", 0.2) == MIN_RETRY_S
    for i in range(100_000):
        backoff.record_empty(f"t{i}", 0.3)
    assert backoff.record_empty("s0", 0.4) == MAX_RETRY_S
    backoff.record_empty("s0", 100.0)
    assert backoff.record_empty("s0", 100.1) == MIN_RETRY_S
