"""Draws the dashboard's own queries on a Prometheus' data, for the documentation and where there is no Grafana:

python -m charts.tools.draw --prometheus http://127.0.0.1:9090 --minutes 5 --out docs/img/dashboard.png
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from charts.tools.dashboard import expression
from charts.tools.panels import ROWS, Panel

SHOWN = (
    "Reward",
    "Policy age of what was trained on",
    "Slots of batches",
    "Rollouts per second",
    "Tokens per second",
    "Who waits",
    "Stored rollouts",
    "Share dropped, by length",
    "Time of requests",
)
NUM_POINTS = 120
WINDOW_S = 15
TIMEOUT_S = 30.0


def series(prometheus: str, panel: Panel, start_s: float, end_s: float) -> list[tuple[str, list[float], list[float]]]:
    """(legend, seconds since the start, values) of every series of a panel."""
    found = []
    for query, legend in panel.queries:
        text = expression(query).replace("$__rate_interval", f"{WINDOW_S}s")
        for variable in ("$namespace", "$buffer", "$reward"):
            text = text.replace(variable, ".*")
        step_s = max(1.0, (end_s - start_s) / NUM_POINTS)
        asked = urlencode({"query": text, "start": start_s, "end": end_s, "step": step_s})
        with urlopen(f"{prometheus}/api/v1/query_range?{asked}", timeout=TIMEOUT_S) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        for one in result:
            name = legend
            for label, value in one["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [(at - start_s, float(value)) for at, value in one["values"] if value != "NaN"]
            found.append((name, [x for x, _ in points], [y for _, y in points]))
    return found


def draw(prometheus: str, minutes: float, ago_s: float, out: Path) -> None:
    """Write the picture."""
    end_s = time.time() - ago_s
    start_s = end_s - 60 * minutes
    panels = {panel.title: panel for row in ROWS for panel in row.panels}
    figure, axes = plt.subplots(3, 3, figsize=(15, 9), constrained_layout=True)
    for axis, title in zip(axes.flat, SHOWN, strict=True):
        for name, x, y in series(prometheus, panels[title], start_s, end_s):
            axis.plot(x, y, label=name, linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("s", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(out, dpi=70)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--ago-s", type=float, default=0.0, help="how long ago the picture ends")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw(args.prometheus, args.minutes, args.ago_s, args.out)


if __name__ == "__main__":
    main()
