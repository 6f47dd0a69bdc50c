"""Prometheus, Grafana and KEDA: alerts that fire when they should and only then, scraping, and a dashboard."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from charts.tools import alerts
from charts.tools.dashboard import FILE, build, text
from charts.tools.panels import ROWS
from tba.fields import RunState
from tests.support.chart import EXTERNAL, needs_helm, render_file
from tests.support.promql import (
    FILES,
    OF_OPERATOR,
    OF_PROMETHEUS,
    ROOT,
    RULES,
    documented_metrics,
    labels_in,
    metrics_in,
    needs_promtool,
    promtool,
    rules,
)

pytestmark = needs_helm
BUFFER, REWARD = (
    f'namespace="ml",job="tba-{name}",service="tba-{name}",endpoint="http",container="{name}",pod="tba-{name}-0"'
    for name in ("buffer", "reward")
)
"""Labels as a scrape of Prometheus's operator makes them: its own win over those that a service exposes."""
MINUTES = 110
LOOK_AT_MINUTE = 100


def still(value: float) -> str:
    return f"{value}x{MINUTES}"


def grows(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


HEALTHY: dict[str, str] = {
    f'tba_build_info{{{BUFFER},component="buffer"}}': still(1),
    f'tba_build_info{{{REWARD},component="reward"}}': still(1),
    f"tba_redis_durable{{{BUFFER}}}": still(1),
    f"tba_redis_lost_data{{{BUFFER}}}": still(0),
    f'tba_requests_total{{{BUFFER},operation="push",status="200"}}': grows(100),
    f'tba_requests_total{{{BUFFER},operation="push",status="429"}}': grows(50),
    f'tba_requests_total{{{BUFFER},operation="push",status="503"}}': grows(1),
    f"tba_unauthorized_total{{{BUFFER}}}": grows(3),
    f'tba_run_state{{{BUFFER},state="running"}}': still(1),
    f'tba_run_state{{{BUFFER},state="paused"}}': still(0),
    f'tba_run_state{{{BUFFER},state="failed"}}': still(0),
    f"tba_run_step{{{BUFFER}}}": " ".join(f"{step}x19" for step in range(6)),  # every 20 minutes
    f"tba_searchers_desired{{{BUFFER}}}": still(3),
    f'tba_components_alive{{{BUFFER},kind="searcher"}}': still(3),
    f'tba_components_alive{{{BUFFER},kind="trainer"}}': still(1),
    f'tba_scaling_failures_total{{{BUFFER},reason="forbidden"}}': still(3),
    f'tba_trainer_wait_seconds_total{{{BUFFER},name="rollouts"}}': grows(25),
    f'tba_trainer_wait_seconds_total{{{BUFFER},name="unpublished-versions"}}': grows(10),
    f'tba_trainer_wait_seconds_total{{{BUFFER},name="run-paused"}}': grows(0),
    f'tba_component_wait_seconds{{{BUFFER},kind="searcher",name="leases"}}': still(1700),
    f'tba_component_wait_seconds{{{BUFFER},kind="searcher",name="run-done"}}': still(9000),
    f'tba_component_wait_overdue_seconds{{{BUFFER},kind="searcher"}}': still(20),
    f'tba_rollouts_total{{{BUFFER},outcome="new"}}': grows(1000),
    f'tba_buffer_refused_total{{{BUFFER},reason="too-large"}}': grows(5),
    f'tba_buffer_evicted_total{{{BUFFER},reason="policy_age",length="17-32"}}': grows(100),
    f'tba_buffer_evicted_total{{{BUFFER},reason="max_rollouts",length="17-32"}}': grows(900),
    f'tba_buffer_rollouts{{{BUFFER},status="scored"}}': still(900),
    f'tba_buffer_rollouts{{{BUFFER},status="pending"}}': still(100),
    f'tba_reward_verifications_total{{{REWARD},task="math",result="scored"}}': grows(1000),
    f'tba_reward_verifications_total{{{REWARD},task="math",result="timeout"}}': grows(20),
    f'tba_reward_worker_losses_total{{{REWARD},cause="timeout"}}': grows(10),
    f'tba_reward_worker_losses_total{{{REWARD},cause="crashed"}}': still(3),
    f"tba_drawn_rollouts_total{{{BUFFER}}}": grows(1500),
    f'tba_trainer_refused_total{{{BUFFER},reason="too-long"}}': grows(30),
    f'tba_skipped_batches_total{{{BUFFER},reason="grad_norm"}}': still(5),
    f"tba_void_rollouts_total{{{BUFFER}}}": grows(100),
    f'tba_buffer_leases_total{{{BUFFER},event="granted"}}': grows(100),
    f'tba_buffer_leases_total{{{BUFFER},event="expired"}}': grows(10),
}

RUNNING, PAUSED, FAILED = (f'tba_run_state{{{BUFFER},state="{state}"}}' for state in ("running", "paused", "failed"))
FAULTS: dict[str, Mapping[str, str | None]] = {
    "TbaBufferDown": {f'tba_build_info{{{BUFFER},component="buffer"}}': None},
    "TbaRewardDown": {f'tba_build_info{{{REWARD},component="reward"}}': None},
    "TbaRedisNotDurable": {f"tba_redis_durable{{{BUFFER}}}": still(0)},
    "TbaRedisLostData": {f"tba_redis_lost_data{{{BUFFER}}}": still(1)},
    "TbaRequestsFail": {f'tba_requests_total{{{BUFFER},operation="push",status="503"}}': grows(10)},
    "TbaUnauthorized": {f"tba_unauthorized_total{{{BUFFER}}}": grows(60)},
    "TbaRunFailed": {RUNNING: still(0), FAILED: still(1)},
    "TbaRunPaused": {RUNNING: still(0), PAUSED: still(1), f"tba_run_step{{{BUFFER}}}": still(3)},
    "TbaNoStep": {f"tba_run_step{{{BUFFER}}}": still(3)},
    "TbaTrainerAbsent": {f'tba_components_alive{{{BUFFER},kind="trainer"}}': None},
    "TbaSearchersMissing": {f'tba_components_alive{{{BUFFER},kind="searcher"}}': None},
    "TbaScalingFails": {f'tba_scaling_failures_total{{{BUFFER},reason="forbidden"}}': grows(12)},
    "TbaTrainerStarved": {f'tba_trainer_wait_seconds_total{{{BUFFER},name="rollouts"}}': grows(35)},
    "TbaTrainerWaitsForStore": {f'tba_trainer_wait_seconds_total{{{BUFFER},name="unpublished-versions"}}': grows(15)},
    "TbaWaitIsLong": {f'tba_component_wait_seconds{{{BUFFER},kind="searcher",name="leases"}}': still(1900)},
    "TbaWaitOverdue": {f'tba_component_wait_overdue_seconds{{{BUFFER},kind="searcher"}}': still(90)},
    "TbaRolloutsRefused": {f'tba_buffer_refused_total{{{BUFFER},reason="too-large"}}': grows(15)},
    "TbaStaleRolloutsDropped": {f'tba_buffer_evicted_total{{{BUFFER},reason="policy_age",length="17-32"}}': grows(300)},
    "TbaUnscoredPileUp": {f'tba_buffer_rollouts{{{BUFFER},status="pending"}}': still(500)},
    "TbaRewardErrors": {f'tba_reward_verifications_total{{{REWARD},task="math",result="timeout"}}': grows(80)},
    "TbaRewardWorkersDie": {f'tba_reward_worker_losses_total{{{REWARD},cause="crashed"}}': grows(1)},
    "TbaTrainerRefuses": {f'tba_trainer_refused_total{{{BUFFER},reason="too-long"}}': grows(90)},
    "TbaBatchesSkipped": {f'tba_skipped_batches_total{{{BUFFER},reason="grad_norm"}}': grows(1)},
    "TbaBatchesVoid": {f"tba_void_rollouts_total{{{BUFFER}}}": grows(400)},
    "TbaLeasesExpire": {f'tba_buffer_leases_total{{{BUFFER},event="expired"}}': grows(30)},
}


ABSENT = ("TbaBufferDown", "TbaRewardDown")
"""They fire where nothing is left to tell releases apart by, so each needs a Prometheus of its own."""


def unit_tests(rule_file: str) -> dict[str, Any]:
    """The document for `promtool test rules`: over a healthy run nothing fires, over each fault its alert alone.

    The faults are namespaces of one Prometheus, so that no alert may take another release's series for its own.
    """
    together = {"healthy": {}, **{name: changes for name, changes in FAULTS.items() if name not in ABSENT}}
    cases = [_case(together, {name: name for name in together if name != "healthy"})]
    cases += [_case({"": FAULTS[name]}, {"": name}) for name in ABSENT]
    return {"rule_files": [rule_file], "evaluation_interval": "1m", "tests": cases}


def _case(faults: Mapping[str, Mapping[str, str | None]], fires: Mapping[str, str]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [
            {"series": series.replace('namespace="ml"', f'namespace="{namespace}"'), "values": values}
            for namespace, changes in faults.items()
            for series, values in {**HEALTHY, **changes}.items()
            if values is not None
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, namespace) (ALERTS{alertstate="firing"})',
                "eval_time": f"{LOOK_AT_MINUTE}m",
                "exp_samples": [
                    {"labels": _labels(alert, namespace), "value": 1} for namespace, alert in fires.items()
                ],
            }
        ],
    }


def _labels(alert: str, namespace: str) -> str:
    return f'{{alertname="{alert}"' + (f',namespace="{namespace}"' if namespace else "") + "}"


ALERTS = {rule["alert"]: rule for rule in rules()}


def test_no_label_of_a_metric_is_one_that_the_operator_of_prometheus_replaces() -> None:
    assert {name for name, labels in documented_metrics().items() if labels & OF_OPERATOR} == set()


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_uses_metrics_and_labels_that_exist(name: str) -> None:
    known, query = documented_metrics(), ALERTS[name]["expr"]
    used = metrics_in(query)
    assert used
    assert used - known.keys() == set()
    assert labels_in(query) <= OF_PROMETHEUS.union(*(known[metric] for metric in used))


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    assert alerts.filled(alerts.PAGE.read_text()) == alerts.PAGE.read_text(), "run `make chart-docs`"


def test_the_waits_that_alerts_name_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("| wait | who waits | until |\n")[2].partition("\n\n")[0]
    waits = set(re.findall(r"`([a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines())))
    named = set()
    for rule in ALERTS.values():
        for names in re.findall(r"name!?=~\"([^\"]+)\"", rule["expr"]):
            named.update(name for name in names.split("|") if "*" not in name)
    assert {"rollouts", "object-store"} <= named
    assert named - waits == set()


@needs_promtool
def test_prometheus_reads_rules_and_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "rules.yaml"):
        text = (FILES / name).read_text().replace("/etc/prometheus/", f"{tmp_path}/")
        (tmp_path / name).write_text(text)
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_for_its_fault_alone_and_none_over_a_healthy_run(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(unit_tests(RULES.name)))
    done = promtool("test", "rules", cases.name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_case() -> None:
    assert FAULTS.keys() == ALERTS.keys()
    for name, changes in FAULTS.items():
        assert changes
        assert changes.keys() <= HEALTHY.keys(), name


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
