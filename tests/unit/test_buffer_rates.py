"""Rates come from cumulative counts; what is not known is not made up."""

from __future__ import annotations

import pytest
from tba_buffer.monitoring.stats import WINDOW_S, RateWindow


def counts(generated: int = 0, evicted: int = 0, drawn: int = 0, trained: int = 0) -> dict[str, int]:
    return {"generated": generated, "evicted": evicted, "drawn": drawn, "trained": trained}


def test_nothing_is_known_before_a_second_has_passed() -> None:
    window = RateWindow()
    assert window.rates(5.0, counts(10)) is None
    window.add(5.0, counts(10))
    assert window.rates(5.9, counts(20)) is None
    assert window.rates(6.0, counts(20)) is not None


def test_rates_are_growth_per_second_over_the_window() -> None:
    window = RateWindow()
    for second in range(200):
        window.add(float(second), counts(10 * second, evicted=second, drawn=20 * second))
    rates = window.rates(199.5, counts(10 * 200, evicted=199, drawn=20 * 199))
    assert rates is not None
    assert WINDOW_S <= rates.window_s <= WINDOW_S + 1
    assert rates.generated_per_s == pytest.approx((2000 - 10 * (199.5 - rates.window_s)) / rates.window_s)
    assert rates.drawn_per_s == pytest.approx(20, rel=0.02)
    assert rates.evicted_per_s == pytest.approx(1, rel=0.02)
    assert rates.trained_per_s == 0


def test_counts_of_another_redis_give_no_negative_rate() -> None:
    window = RateWindow()
    window.add(0.0, counts(100))
    assert window.rates(10.0, counts(3)) is None
