"""The alert rules: metrics that exist, a remedy for each, and that they fire when they should and only then."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from charts.tools import alerts
from tests.support.alert_cases import HEALTHY, TROUBLE, unit_tests
from tests.support.promql import (
    FILES,
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

ALERTS = {rule["alert"]: rule for rule in rules()}


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_uses_metrics_and_labels_that_exist(name: str) -> None:
    known, query = documented_metrics(), ALERTS[name]["expr"]
    used = metrics_in(query)
    assert used
    assert used - known.keys() == set()
    assert labels_in(query) <= OF_PROMETHEUS.union(*(known[metric] for metric in used))


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_how_bad_it_is_and_what_happens(name: str) -> None:
    rule = ALERTS[name]
    assert re.fullmatch(r"Tba[A-Z][A-Za-z]+", name)
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert len(rule["annotations"]["summary"]) > 20
    assert len(rule["annotations"]["description"]) > 20
    assert len(rule["annotations"]["remedy"]) > 20
    assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


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
def test_each_alert_fires_in_its_trouble_alone_and_none_over_a_healthy_run(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(unit_tests(RULES.name)))
    done = promtool("test", "rules", cases.name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_case() -> None:
    assert TROUBLE.keys() == ALERTS.keys()
    for name, changes in TROUBLE.items():
        assert changes
        assert changes.keys() <= HEALTHY.keys(), name
