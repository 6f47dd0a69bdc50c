"""What Prometheus, Grafana and KEDA are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.chart import CHART, needs_helm, render_file, value_files
from tests.support.promql import (
    OF_PROMETHEUS,
    RULES,
    documented_metrics,
    labels_in,
    metrics_in,
    needs_promtool,
    promtool,
)

pytestmark = needs_helm
EXTERNAL, QUICKSTART, BARE = (
    next(path for path in value_files() if path.name == name)
    for name in ("external.yaml", "values-cpu-quickstart.yaml", "bare.yaml")
)


def test_the_rules_are_those_of_the_file_for_one_release() -> None:
    rule = render_file(EXTERNAL).one("PrometheusRule", "t")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    text = RULES.read_text()
    for service in ("buffer", "reward"):
        text = text.replace(f'service="{service}"', f'service="{service}",namespace="lab",job="t-{service}"')
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


def test_the_dashboard_is_that_of_the_file() -> None:
    found = render_file(EXTERNAL).one("ConfigMap", "t-dashboards")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "tba"}
    assert json.loads(found["data"]["tba.json"]) == json.loads((CHART / "files/dashboards/tba.json").read_text())


def test_keda_scales_by_a_wait_that_exists() -> None:
    made = render_file(EXTERNAL)
    scaled = made.one("ScaledObject", "t-searcher")["spec"]
    assert scaled["scaleTargetRef"]["name"] == made.pod("searcher").name
    assert "replicas" not in made.one("Deployment", "t-searcher")["spec"]
    (trigger,) = scaled["triggers"]
    query = trigger["metadata"]["query"]
    known = documented_metrics()
    assert metrics_in(query) == {"tba_trainer_wait_seconds_total"}
    assert labels_in(query) <= OF_PROMETHEUS | known["tba_trainer_wait_seconds_total"]
    assert 'namespace="lab",job="t-buffer"' in query
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for wait in query.partition('name=~"')[2].partition('"')[0].split("|"):
        assert f"| `{wait}` | trainer |" in page


@pytest.mark.parametrize("path", [QUICKSTART, BARE], ids=lambda path: path.stem)
def test_nothing_of_an_operator_is_made_unasked(path: Path) -> None:
    made = render_file(path)
    assert made.of("ServiceMonitor") == made.of("PrometheusRule") == made.of("ScaledObject") == []
    assert not [x for x in made.of("ConfigMap") if x["metadata"]["name"] == "t-dashboards"]
