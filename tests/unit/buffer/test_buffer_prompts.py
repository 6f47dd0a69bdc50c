"""The choice and order of visited prompts, and how often searchers ask for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.prompts.catalog import NUM_CANDIDATES, Catalog, VisitCursor, VisitOrder, choose_by_posterior
from tba_buffer.prompts.leases import MAX_POLLS_PER_S, MAX_RETRY_S, MIN_RETRY_S, PollBackoff

from tests.support.buffer import make_prompts, make_recipe
from tests.support.index_values import index_of, make_index


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=60),
    st.integers(0, 2**32),
)
def test_every_visit_gets_a_train_prompt_and_the_same_seed_the_same_ones(
    num_train: int, num: int, tried: list[tuple[int, int]], seed: int
) -> None:
    train_numbers = np.arange(num_train) * 2 + 1  # every second prompt is held out
    counts = numbers([max(pair) for pair in tried])
    successes = numbers([min(pair) for pair in tried])
    first, again = (
        choose_by_posterior(train_numbers, counts, successes, num, np.random.default_rng(seed)) for _ in range(2)
    )
    assert (first.tolist(), len(first)) == (again.tolist(), num)
    assert first.min() >= 0
    assert first.max() < num_train
    assert NUM_CANDIDATES * num > num_train or len(set(first.tolist())) == num


@pytest.mark.parametrize(
    ("train", "counts", "successes", "best"),
    [
        # number 1 (held out) looks perfect; number 2 is hopeless, number 3 is in the middle
        pytest.param([2, 3], [0, 2000, 2000, 2000], [0, 1000, 0, 1000], 1, id="own numbers"),
        pytest.param([0, 1, 2], [100, 100, 0], [0, 100, 0], 2, id="untried beats hopeless and mastered"),
    ],
)
def test_the_most_informative_is_chosen(train: list[int], counts: list[int], successes: list[int], best: int) -> None:
    chosen = [
        choose_by_posterior(numbers(train), numbers(counts), numbers(successes), 1, np.random.default_rng(seed))[0]
        for seed in range(200)
    ]
    assert np.mean(np.array(chosen) == best) > 0.9


def share_in_the_middle(by_posterior: bool, seed: int) -> float:
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
            choose_by_posterior(np.arange(500), counts, successes, 16, rng)
            if by_posterior
            else rng.integers(0, 500, size=16)
        )
        num_middle += int(is_middle[chosen].sum()) if request >= 125 else 0
        np.add.at(counts, chosen, 8)
        np.add.at(successes, chosen, rng.binomial(8, rates[chosen]))
    return num_middle / (125 * 16)


@pytest.mark.parametrize("seed", range(3))
def test_visits_converge_on_prompts_that_succeed_about_half_the_time(seed: int) -> None:
    uniform, posterior = share_in_the_middle(False, seed), share_in_the_middle(True, seed)
    assert uniform < 0.35
    assert posterior > 0.85


def test_the_recipe_chooses_visits_by_posterior() -> None:
    catalog = Catalog.__new__(Catalog)
    catalog.train, catalog._train_numbers = make_prompts(NUM_CANDIDATES), np.arange(NUM_CANDIDATES)
    solved, half, failed = [1.0] * 100, [0.0, 1.0] * 50, [0.0] * 100
    index = index_of([solved, failed, half, *[solved] * (NUM_CANDIDATES - 3)])
    order = VisitOrder(catalog, make_recipe(data={"selection": "posterior"}))
    visits = [visit for offset in range(5) for visit in order.next(VisitCursor(0, offset, NUM_CANDIDATES), 1, index)]
    assert [(visit.visit_id, visit.prompt_id) for visit in visits] == [(f"visit-0-{at}", "train-2") for at in range(5)]


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
