"""Metrics of the components: which are alive or silent, how long they wait, and their own gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from tba.api import ENDED, ComponentInfo, WaitInfo
from tba.wire import STARTED_AT_S, WAITED_S

KINDS: tuple[str, ...] = ("searcher", "trainer", "buffer", "reward")
"""Kinds that are shown even when there is no such component."""
WAITS_SHOWN = 64
OTHER_WAITS = "other"


def component_families(components: Sequence[ComponentInfo], waits: Sequence[WaitInfo]) -> Iterator[Metric]:
    """Yield the metrics of components and waits."""
    # kinds without a component are shown as 0: alerts compare with that
    none = dict.fromkeys(KINDS, 0)
    text = "Components with a recent sign of life, by kind"
    alive = Counter(item.kind for item in components if item.alive)
    yield gauges_by("tba_components_alive", text, "kind", {**none, **alive})
    text = "Components without a recent sign of life that did not announce their end, by kind"
    silent = Counter(item.kind for item in components if not item.alive and item.state not in ENDED)
    yield gauges_by("tba_components_silent", text, "kind", {**none, **silent})
    ages_s: dict[str, float] = {}
    for item in components:
        ages_s[item.kind] = min(item.heartbeat_age_s, ages_s.get(item.kind, item.heartbeat_age_s))
    text = "Age of the newest sign of life, by kind"
    yield gauges_by("tba_component_heartbeat_age_seconds", text, "kind", ages_s)
    yield _longest(waits)
    late_s = dict.fromkeys(KINDS, 0.0)
    for wait in waits:
        kind = wait.kind or "buffer"
        late_s[kind] = max(late_s.get(kind, 0.0), -wait.deadline_in_s)
    text = "How long the most overdue wait is past its own deadline, by kind"
    yield gauges_by("tba_component_wait_overdue_seconds", text, "kind", late_s)


def gauges_by(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """Return a gauge for each value of a label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _longest(waits: Sequence[WaitInfo]) -> GaugeMetricFamily:
    """Return the longest wait by kind and name."""
    # names come from heartbeats and labels must stay few: all but the longest waits share one name
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


MAX_NAMES = 64
"""Gauges per kind of component, since labels must stay few. GET /v1/run shows all."""


def gauge_families(components: Sequence[ComponentInfo]) -> Iterator[Metric]:
    """Yield the gauges of the trainer that was heard of last, and the sums over all searchers that are alive."""
    alive = [item for item in components if item.alive]
    # while one trainer takes over from another, both are alive: the one that was heard of last counts
    trainers = sorted((item for item in alive if item.kind == "trainer"), key=lambda item: item.heartbeat_age_s)
    yield _family("tba_trainer_gauge", "Gauges of the trainer", trainers[0].gauges if trainers else {})
    sums: Counter[str] = Counter()
    for item in alive:
        if item.kind == "searcher":
            for name, value in item.gauges.items():
                sums[name] += value  # pyright: ignore[reportArgumentType]
    yield _family("tba_searcher_gauge", "Gauges of the searchers, summed over those alive", sums)


def _family(name: str, text: str, gauges: Mapping[str, float]) -> GaugeMetricFamily:
    shown = sorted(name for name in gauges if name != STARTED_AT_S and not name.startswith(WAITED_S))
    return gauges_by(name, f"{text}, by name", "name", {gauge: gauges[gauge] for gauge in shown[:MAX_NAMES]})
