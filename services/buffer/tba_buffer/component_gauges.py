"""What searchers and the trainer say of themselves with every heartbeat, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from tba.api import ComponentInfo
from tba.wire import STARTED_AT_S, WAITED_S

MAX_NAMES = 64
"""Of one kind of component: labels must stay few. Beyond them gauges are only in GET /v1/run."""


def gauge_families(components: Sequence[ComponentInfo]) -> Iterator[Metric]:
    """The gauges of the trainer that was heard of last, and the sums of those of all searchers that are alive."""
    alive = [item for item in components if item.alive]
    trainers = sorted((item for item in alive if item.kind == "trainer"), key=lambda item: item.heartbeat_age_s)
    yield _family("tba_trainer_gauge", "Gauges of the trainer", trainers[0].gauges if trainers else {})
    sums: Counter[str] = Counter()
    for item in alive:
        if item.kind == "searcher":
            for name, value in item.gauges.items():
                sums[name] += value  # pyright: ignore[reportArgumentType]
    yield _family("tba_searcher_gauge", "Gauges of the searchers, summed over those alive", sums)


def _family(name: str, text: str, gauges: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, f"{text}, by name", labels=["name"])
    shown = sorted(name for name in gauges if name != STARTED_AT_S and not name.startswith(WAITED_S))
    for gauge in shown[:MAX_NAMES]:
        family.add_metric([gauge], gauges[gauge])
    return family
