"""Finds the metrics and labels in PromQL queries, and the metrics that docs/operations.md lists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "tba" / "files"
RULES = FILES / "rules.yaml"
OF_PROMETHEUS = {"namespace", "job", "le", "release"}
"""Labels that Prometheus and the ServiceMonitor add, and the label of buckets."""
OF_OPERATOR = {"namespace", "job", "service", "endpoint", "container", "pod", "node", "instance"}
"""Labels that Prometheus's operator gives a target; they win over labels of the same name that a service exposes."""
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH (Debian package prometheus)")


def documented_metrics() -> dict[str, set[str]]:
    """Return metric -> its labels from the table of docs/operations.md; a buffer test compares it with /metrics."""
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("| metric | labels | meaning |\n")[2].partition("\n\n")[0]
    found: dict[str, set[str]] = {}
    for line in table.splitlines()[1:]:
        cells = [cell.strip() for cell in line.split("|")[1:3]]
        for name in re.findall(r"`(tba_\w+)`", cells[0]):
            found[name] = set(re.findall(r"\w+", cells[1]))
    return found


def metrics_in(query: str) -> set[str]:
    """Return the names of the metrics in a query; histograms without _bucket, _sum and _count."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\btba_\w+", query)}


def labels_in(query: str) -> set[str]:
    """Return the names of the labels that a query selects or groups by."""
    selected = {
        name for braces in re.findall(r"\{([^}]*)\}", query) for name in re.findall(r"(\w+)\s*[=!]~?\"", braces)
    }
    grouped = re.findall(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", query)
    return selected | {name for names in grouped for name in re.findall(r"\w+", names)}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROMTOOL), *args], capture_output=True, text=True, timeout=60, cwd=cwd)
