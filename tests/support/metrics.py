"""Read GET /metrics of a service."""

from __future__ import annotations

import urllib.request

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def metrics_of(url: str) -> list[Metric]:
    """Return the metric families that a service exposes."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def values(url: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of one metric: label values, in the order of exposition, -> value."""
    samples = [sample for family in metrics_of(url) for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}
