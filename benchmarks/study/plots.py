"""Plots of the study as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.cells import Line
from benchmarks.study.methods import METHODS
from benchmarks.study.stats import estimate
from benchmarks.study.tables import LAGS, mean_ess, select

Lines = Mapping[str, Line]
FAMILY_STYLE, BASELINE_STYLE = "-", "--"


def write_plots(lines: Lines, folder: Path) -> list[Path]:
    """Accuracy and ESS by lag, and the learning curves at lag 16; only what has data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, draw in (("accuracy_by_lag", _by_lag), ("curves_lag16", _curves)):
        figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
        draw(lines, axes)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=90, metadata={"Software": None})
        pyplot.close(figure)
    return written


def _by_lag(lines: Lines, axes: Any) -> None:
    places = {lag: place for place, lag in enumerate(LAGS)}
    for number, (method, about) in enumerate(METHODS.items()):
        style = FAMILY_STYLE if about.is_family else BASELINE_STYLE
        for axis, value in ((axes[0], lambda line: line.final), (axes[1], mean_ess)):
            points = []
            for lag in LAGS:
                found = select(lines, "lag", method, lag).values()
                if values := [v for line in found if (v := value(line)) is not None]:
                    mean = estimate(values)
                    points.append((places[lag], mean.mean, 0.0 if mean.num < 2 else mean.half_width))
            if points:
                x, y, half = (np.array(column) for column in zip(*points, strict=True))
                shift = (number - len(METHODS) / 2) * 0.02
                axis.errorbar(x + shift, y, half, ls=style, marker="o", ms=3, color=_color(number), label=method, lw=1)
    for axis, title in ((axes[0], "final sampled accuracy, mean and 95 % interval"), (axes[1], "ESS, second half")):
        axis.set_xticks(range(len(LAGS)), [f"lag {lag}" for lag in LAGS])
        axis.set_title(title)
        axis.grid(alpha=0.3)
    _legend(axes[0])


def _curves(lines: Lines, axes: Any) -> None:
    for number, (method, about) in enumerate(METHODS.items()):
        for axis, lag in ((axes[0], 1), (axes[1], 16)):
            curves = [line.result["curve"]["sampled"] for line in select(lines, "lag", method, lag).values()]
            whole = [curve for curve in curves if len(curve) == max(map(len, curves))]
            if whole:
                style = FAMILY_STYLE if about.is_family else BASELINE_STYLE
                steps = np.arange(len(whole[0])) * 10
                axis.plot(steps, np.mean(whole, axis=0), style, color=_color(number), label=method, lw=1.2)
            axis.set_title(f"sampled accuracy at lag {lag}, mean of the seeds")
            axis.set_xlabel("optimizer step")
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
    _legend(axes[1])


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, ncol=2)


def _color(number: int) -> str:
    from matplotlib import colormaps

    return colormaps["tab20"](number / 20)  # type: ignore[return-value]
