"""The Grafana dashboard: made from panels.py, on metrics that exist, every panel with how to read it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from charts.tools.dashboard import FILE, build, text
from charts.tools.panels import ROWS
from tests.support.promql import OF_PROMETHEUS, documented_metrics, labels_in, metrics_in, needs_promtool, promtool

PANELS = [panel for row in ROWS for panel in row.panels]


def test_the_file_is_what_panels_make() -> None:
    assert FILE.read_text() == text(), "run `make chart-docs`"
    assert json.loads(FILE.read_text()) == build()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_uses_metrics_and_labels_that_exist(panel) -> None:
    known = documented_metrics()
    for query, legend in panel.queries:
        used = metrics_in(query)
        assert used - known.keys() == set()
        assert labels_in(query) <= OF_PROMETHEUS.union(*(known[metric] for metric in used))
        assert legend
    assert len(panel.read) > 15


def test_panels_do_not_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in build()["panels"]]
    taken = [{(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])} for p in places]
    assert sum(map(len, taken)) == len(set().union(*taken))
    assert all(first["y"] <= second["y"] for first, second in pairwise(places))
    assert max(p["x"] + p["w"] for p in places) <= 24


def test_every_metric_of_a_run_is_on_the_dashboard() -> None:
    shown = {name for panel in PANELS for query, _ in panel.queries for name in metrics_in(query)}
    left_out = {
        "tba_build_info",  # chooses the release
        "tba_buffer_batches_total",  # steps, as slots and rollouts
        "tba_buffer_foreign_writes_total",  # an attack, or a defect: neither is looked at every day
        "tba_buffer_rescored_total",  # while tba rescore runs; it prints them
        "tba_published_versions_total",
        "tba_reward_scores_total",  # the scorers behind a task's result
        "tba_reward_scorer_seconds",
        "tba_scaling_failures_total",  # an alert
    }
    assert set(documented_metrics()) - shown == left_out


@needs_promtool
def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in build()["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 40
    rules = [
        {"record": f"tba:query_{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
