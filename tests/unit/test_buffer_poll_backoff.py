"""Searchers that wait ask less often when they are many."""

from __future__ import annotations

from tba_buffer.prompts.leases import MAX_POLLS_PER_S, MAX_RETRY_S, MIN_RETRY_S, PollBackoff


def polls_per_s(backoff: PollBackoff, names: list[str], during_s: float = 20.0) -> float:
    """Simulated: every searcher asks when it was told to; asks a second in the last half of the time."""
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
