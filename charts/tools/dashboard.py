"""Write charts/tba/files/dashboards/tba.json from panels.py: `python -m charts.tools.dashboard`, or `make chart-docs`.

Grafana's JSON is repetitive; panels.py has only what a person chooses. A test compares the file with the output.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from charts.tools.panels import ROWS, STACKED, Panel

FILE = Path(__file__).parents[1] / "tba" / "files" / "dashboards" / "tba.json"
SELECTORS = {
    "BUFFER": 'namespace=~"$namespace",job=~"$buffer"',
    "REWARD": 'namespace=~"$namespace",job=~"$reward"',
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
STAT_HEIGHT, GRAPH_HEIGHT, GRID_WIDTH = 4, 8, 24


def expression(query: str) -> str:
    """Return the PromQL of a panel with the labels of one release."""
    return re.sub(r"\b(BUFFER|REWARD)\b", lambda found: SELECTORS[found[1]], query)


def build() -> dict[str, Any]:
    """Return the dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "id": len(panels) + 1,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y = 0, y + height
            height = GRAPH_HEIGHT if panel.kind == "timeseries" else STAT_HEIGHT
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
            x += panel.width
        y += height
    return {
        "uid": "tba-run",
        "title": "tba run",
        "description": "One run: what it does, how it learns, whether it is fresh and busy, what is dropped and why.",
        "tags": ["tba"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression(query), "legendFormat": legend}
        for number, (query, legend) in enumerate(panel.queries)
    ]
    common = {"title": panel.title, "description": panel.read, "datasource": SOURCE, "targets": targets}
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "auto"}
        if panel.style == STACKED:
            custom.update(fillOpacity=40, stacking={"mode": "normal", "group": "A"})
        return {
            **common,
            "type": "timeseries",
            "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
        }
    return {
        **common,
        "type": "stat",
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "name" if panel.kind == "name" else "auto",
            "colorMode": "none",
            "graphMode": "none",
        },
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}

    def labels(name: str, text: str, metric: str, label: str) -> dict[str, Any]:
        query = f"label_values({metric}, {label})"
        return {
            "name": name,
            "label": text,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",  # also series without the label: Compose has no namespaces
            "current": {"text": "All", "value": "$__all"},
            "sort": 1,
        }

    return [
        source,
        labels("namespace", "Namespace", "tba_build_info", "namespace"),
        labels("buffer", "Buffer", 'tba_build_info{component="buffer",namespace=~"$namespace"}', "job"),
        labels("reward", "Reward", 'tba_build_info{component="reward",namespace=~"$namespace"}', "job"),
    ]


if __name__ == "__main__":
    FILE.write_text(text())
