"""Labels of metrics stay few, whatever names the components send."""

from __future__ import annotations

from collections import Counter

from tba_buffer.monitoring.metrics import OTHER_WAITS, WAITS_SHOWN, shown_waits


def test_rare_waits_are_counted_together() -> None:
    waits = Counter({f"wait-{i}": 1000 - i for i in range(WAITS_SHOWN + 500)})
    shown = shown_waits(waits)
    assert len(shown) == WAITS_SHOWN + 1
    assert sum(shown.values()) == waits.total()
    assert shown["wait-0"] == 1000


def test_a_wait_called_other_is_counted_with_the_others() -> None:
    waits = Counter({OTHER_WAITS: 2000} | {f"wait-{i}": 1 for i in range(100)})
    assert sum(shown_waits(waits).values()) == 2100


def test_few_waits_are_shown_as_they_are() -> None:
    assert shown_waits(Counter({"rollouts": 2})) == {"rollouts": 2}
