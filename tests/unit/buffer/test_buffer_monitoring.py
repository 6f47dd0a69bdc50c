"""Stats, rates and metrics of the buffer, against counts by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from tba_buffer.monitoring.metrics import OTHER_WAITS, WAITS_SHOWN, shown_waits
from tba_buffer.monitoring.stats import VERSIONS_SHOWN, WINDOW_S, RateWindow, stored_stats

from tba.versions import PolicyVersion
from tests.support.index_values import Item, make_added, make_evicted, make_index


def test_deciles_are_of_the_scored_rollouts_that_are_still_stored() -> None:
    index = make_index(make_added(1, [*(Item(reward=float(i)) for i in range(11)), Item(status="pending")]))
    detail = stored_stats(index)
    assert detail.reward_deciles == [float(i) for i in range(11)]
    index.apply(make_evicted(13, [11]))
    detail = stored_stats(index)
    assert (detail.log_position, detail.reward_deciles and detail.reward_deciles[-1]) == (13, 9.0)


def test_only_the_newest_versions_are_named_and_the_rest_is_counted() -> None:
    versions = [PolicyVersion(1, step) for step in range(1, VERSIONS_SHOWN + 31)]
    detail = stored_stats(make_index(make_added(1, [Item(version=version) for version in versions])))
    assert (len(detail.by_version), detail.num_of_older_versions) == (VERSIONS_SHOWN, 30)
    assert next(iter(detail.by_version)) == str(versions[-1])


def test_an_empty_buffer_has_no_deciles() -> None:
    assert stored_stats(make_index()).reward_deciles is None


def counts(generated: int = 0, evicted: int = 0, drawn: int = 0, trained: int = 0) -> dict[str, int]:
    counted = {"generated": generated, "evicted": evicted, "drawn": drawn, "trained": trained}
    return {**counted, "generated_tokens": 3 * generated, "trained_tokens": 0}


def test_nothing_is_known_before_a_second_has_passed() -> None:
    window = RateWindow()
    assert window.rates(5.0, counts(10)) is None
    window.add(5.0, counts(10))
    assert window.rates(5.9, counts(20)) is None
    assert window.rates(6.0, counts(20)) is not None


def test_the_wait_for_the_first_rollout_lowers_no_rate() -> None:
    window = RateWindow()
    for second in range(40):
        window.add(float(second), counts(100 * max(0, second - 30)))
    rates = window.rates(40.0, counts(1000))
    assert rates is not None
    assert rates.generated_per_s == pytest.approx(100)


def test_rates_are_growth_per_second_over_the_window() -> None:
    window = RateWindow()
    for second in range(200):
        window.add(float(second), counts(10 * second, evicted=second, drawn=20 * second))
    rates = window.rates(199.5, counts(10 * 200, evicted=199, drawn=20 * 199))
    assert rates is not None
    assert WINDOW_S <= rates.window_s <= WINDOW_S + 1
    assert rates.generated_per_s == pytest.approx((2000 - 10 * (199.5 - rates.window_s)) / rates.window_s)
    assert rates.generated_tokens_per_s == pytest.approx(3 * rates.generated_per_s)
    assert (rates.drawn_per_s, rates.evicted_per_s) == (pytest.approx(20, rel=0.02), pytest.approx(1, rel=0.02))
    assert rates.trained_per_s == 0


def test_counts_of_another_redis_give_no_negative_rate() -> None:
    window = RateWindow()
    window.add(0.0, counts(100))
    assert window.rates(10.0, counts(3)) is None


def test_rare_waits_are_counted_together() -> None:
    waits = Counter({f"wait-{i}": 1000 - i for i in range(WAITS_SHOWN + 500)})
    shown = shown_waits(waits)
    assert (len(shown), sum(shown.values()), shown["wait-0"]) == (WAITS_SHOWN + 1, waits.total(), 1000)
    waits[OTHER_WAITS] = 2000
    assert sum(shown_waits(waits).values()) == waits.total()
    assert shown_waits(Counter({"rollouts": 2})) == {"rollouts": 2}
