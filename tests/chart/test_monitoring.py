"""The chart for Prometheus and Grafana: scraping, and a dashboard of metrics that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import yaml

from charts.tools.dashboard import FILE, build, text
from charts.tools.panels import ROWS
from tba.fields import RunState
from tests.support.chart import EXTERNAL, needs_helm, render_file
from tests.support.promql import (
    OF_PROMETHEUS,
    RULES,
    documented_metrics,
    labels_in,
    metrics_in,
    needs_promtool,
    promtool,
)

# ---- Prometheus, Grafana and KEDA -----------------------------------------------------------------------------------


pytestmark = needs_helm


def test_the_rules_are_those_of_the_file_for_one_release() -> None:
    rule = render_file(EXTERNAL).one("PrometheusRule", "t")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    text = RULES.read_text()
    for service in ("buffer", "reward"):
        text = text.replace(f'component="{service}"', f'component="{service}",namespace="lab",job="t-{service}"')
    text = text.replace("docs/operations.md#", "https://docs.lab.example/tba/operations/#")
    assert rule["spec"] == yaml.safe_load(text)
    names = {x["metadata"]["name"] for x in render_file(EXTERNAL).of("Service")}
    assert {"t-buffer", "t-reward"} <= names


@needs_promtool
def test_prometheus_reads_the_rules_of_a_release(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(render_file(EXTERNAL).one("PrometheusRule", "t")["spec"]))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_buffer_and_reward_are_scraped_and_nothing_else() -> None:
    made = render_file(EXTERNAL)
    monitor = made.one("ServiceMonitor", "t")["spec"]
    assert monitor["namespaceSelector"] == {"matchNames": ["lab"]}
    (endpoint,) = monitor["endpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "tba-tls", "key": "ca.crt"}
    assert endpoint["tlsConfig"]["serverName"] == "t-buffer", "it scrapes addresses, which no certificate names"
    wanted = monitor["selector"]
    (expression,) = wanted["matchExpressions"]
    scraped = {
        service["metadata"]["name"]: [port["name"] for port in service["spec"]["ports"]]
        for service in made.of("Service")
        if wanted["matchLabels"].items() <= service["metadata"]["labels"].items()
        and service["metadata"]["labels"][expression["key"]] in expression["values"]
    }
    assert scraped == {"t-buffer": [endpoint["port"]], "t-reward": [endpoint["port"]]}


def test_keda_scales_by_a_wait_that_exists() -> None:
    made = render_file(EXTERNAL)
    scaled = made.one("ScaledObject", "t-searcher")["spec"]
    assert scaled["scaleTargetRef"]["name"] == made.pod("searcher").name
    assert "replicas" not in made.one("Deployment", "t-searcher")["spec"]
    trigger = scaled["triggers"][0]
    query = trigger["metadata"]["query"]
    known = documented_metrics()
    assert metrics_in(query) == {"tba_trainer_wait_seconds_total"}
    assert labels_in(query) <= OF_PROMETHEUS | known["tba_trainer_wait_seconds_total"]
    assert 'namespace="lab",job="t-buffer"' in query
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for wait in query.partition('name=~"')[2].partition('"')[0].split("|"):
        assert f"| `{wait}` | trainer |" in page


def test_keda_frees_the_gpus_once_the_run_is_over_and_not_before() -> None:
    scaled = render_file(EXTERNAL).one("ScaledObject", "t-searcher")["spec"]
    assert scaled["idleReplicaCount"] == 0 < scaled["minReplicaCount"], "KEDA takes no other"
    assert scaled["cooldownPeriod"] == 60
    by_the_wait, of_the_run = scaled["triggers"]
    # else a query of one's own that is never 0 would keep the searchers of a run that is over
    assert float(by_the_wait["metadata"]["activationThreshold"]) == 1e300
    known, query = documented_metrics(), of_the_run["metadata"]["query"]
    assert metrics_in(query) == {"tba_run_state"}
    assert labels_in(query) <= OF_PROMETHEUS | known["tba_run_state"]
    over = query.partition('state!~"')[2].partition('"')[0].split("|")
    assert set(get_args(RunState)) - set(over) == {"running", "paused", "stopping"}
    # desired = value / threshold = 1, never more than minReplicas; without an answer KEDA leaves the number alone
    assert (of_the_run["metricType"], of_the_run["metadata"]["threshold"]) == ("AverageValue", "1")
    assert of_the_run["metadata"]["activationThreshold"] == "0"
    assert of_the_run["metadata"]["ignoreNullValues"] == "false"
    assert all(isinstance(value, str) for trigger in scaled["triggers"] for value in trigger["metadata"].values())


# ---- The Grafana dashboard ------------------------------------------------------------------------------------------


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
