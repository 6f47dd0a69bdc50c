"""The metrics about components: who is alive, who has fallen silent, what is waited for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from tba.api import ComponentInfo, WaitInfo

KINDS: tuple[str, ...] = ("searcher", "trainer", "buffer", "reward")
"""Shown when there is none of them, too."""
ENDED = frozenset({"ended", "done", "stopped"})
"""Last states of components that ended as they should; whoever is gone in another state has fallen silent."""
WAITS_SHOWN = 64
OTHER_WAITS = "other"


def component_families(components: Sequence[ComponentInfo], waits: Sequence[WaitInfo]) -> Iterator[Metric]:
    """The metrics of what GET /v1/run shows."""
    alive = Counter(item.kind for item in components if item.alive)
    yield _by_kind(
        "tba_components_alive",
        "Components with a recent sign of life",
        {kind: alive[kind] for kind in (*KINDS, *(alive.keys() - set(KINDS)))},
    )
    silent = Counter(item.kind for item in components if not item.alive and item.state not in ENDED)
    yield _by_kind(
        "tba_components_silent",
        "Components without a recent sign of life that did not say that they end",
        {kind: silent[kind] for kind in (*KINDS, *(silent.keys() - set(KINDS)))},
    )
    ages_s: dict[str, float] = {}
    for item in components:
        ages_s[item.kind] = min(item.heartbeat_age_s, ages_s.get(item.kind, item.heartbeat_age_s))
    yield _by_kind("tba_component_heartbeat_age_seconds", "Age of the newest sign of life", ages_s)
    yield _longest(waits)
    late_s = dict.fromkeys(KINDS, 0.0)
    for wait in waits:
        kind = wait.kind or "buffer"
        late_s[kind] = max(late_s.get(kind, 0.0), -wait.deadline_in_s)
    yield _by_kind(
        "tba_component_wait_overdue_seconds", "By how much the wait that is latest is past its own deadline", late_s
    )


def _by_kind(name: str, text: str, values: dict[str, int] | dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, f"{text}, by kind", labels=["kind"])
    for kind, value in values.items():
        family.add_metric([kind], value)
    return family


def _longest(waits: Sequence[WaitInfo]) -> GaugeMetricFamily:
    """Names come from heartbeats, and labels must stay few: beyond the longest waits there is one for all the rest."""
    longest_s: dict[tuple[str, str], float] = {}
    for wait in sorted(waits, key=lambda wait: -wait.for_s):
        kind = wait.kind or "buffer"
        is_shown = len(longest_s) < WAITS_SHOWN or (kind, wait.name) in longest_s
        longest_s.setdefault((kind, wait.name if is_shown else OTHER_WAITS), wait.for_s)
    family = GaugeMetricFamily(
        "tba_component_wait_seconds", "The longest wait now, by kind and name", labels=["kind", "name"]
    )
    for labels, for_s in longest_s.items():
        family.add_metric(labels, for_s)
    return family
