"""The choice and order of visited prompts, and how often searchers ask for them."""

from __future__ import annotations

import pytest
from tba_buffer.prompts.catalog import Catalog, VisitCursor, VisitOrder
from tba_buffer.prompts.leases import MAX_POLLS_PER_S, MAX_RETRY_S, MIN_RETRY_S, PollBackoff

from tests.support.buffer import make_prompts, make_recipe

# ---- The order of visits is a function of the cursor, the seed and the prompts --------------------------------------


def place(cursor: str) -> VisitCursor:
    return VisitCursor.parse(cursor.encode(), num_train=9)


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    catalog = Catalog.__new__(Catalog)
    catalog.train = make_prompts(7)
    order = VisitOrder(catalog, make_recipe())
    visits = order.next(None, 21)
    epochs = [[visit.prompt_id for visit in visits[at : at + 7]] for at in (0, 7, 14)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({visit.visit_id for visit in visits}) == 21
    again = VisitOrder(catalog, make_recipe())
    assert [v.prompt_id for v in again.next(place(visits[9].cursor_after), 11)] == [v.prompt_id for v in visits[10:]]
    catalog.train = make_prompts(9)
    assert [v.prompt_id for v in order.next(place(visits[9].cursor_after), 4)] == [v.prompt_id for v in visits[10:14]]
    assert {v.prompt_id for v in order.next(place(visits[13].cursor_after), 9)} == {f"train-{i}" for i in range(9)}


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
