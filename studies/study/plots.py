"""Plots of the studies as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from studies.study.cells import Line
from studies.study.plan import BASE_LAG, Study, at_lag
from studies.study.world import TASKS

PLOTTED_LAGS = (0, BASE_LAG, 64)


def write_plots(study: Study, folder: Path) -> list[Path]:
    """Learning curves of each task that has some, sampled and greedy, at lags 0, 16 and 64."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for task in filter(lambda task: has_curves(study, task), TASKS):
        figure, axes = pyplot.subplots(len(PLOTTED_LAGS), 2, figsize=(12, 12), layout="constrained")
        for row, lag in zip(axes, PLOTTED_LAGS, strict=True):
            for axis, name in zip(row, ("sampled", "greedy"), strict=True):
                _curves(study, task, lag, name, axis)
        written.append(folder / f"curves_{task}.png")
        figure.savefig(written[-1], dpi=90, metadata={"Software": None})
        pyplot.close(figure)
    return written


def has_curves(study: Study, task: str) -> bool:
    """Whether there is anything to draw."""
    return any(study.found(arm) for lag in PLOTTED_LAGS for arm in at_lag(task, lag))


def mean_curve(lines: list[Line], name: str) -> tuple[list[int], list[float]]:
    """Steps and mean values of the runs that went to their end."""
    whole = [line.result["curve"] for line in lines if not line.broke]
    if not whole:
        return [], []
    return whole[0]["step"], np.mean([curve[name] for curve in whole], axis=0).tolist()


def _curves(study: Study, task: str, lag: int, name: str, axis: Any) -> None:
    for arm in at_lag(task, lag):
        steps, values = mean_curve(list(study.found(arm).values()), name)
        if steps:
            axis.plot(steps, values, label=arm.method, lw=1.2)
    axis.set_title(f"{task}, lag {lag}: {name} accuracy, mean of the seeds")
    axis.set_xlabel("optimizer step")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
