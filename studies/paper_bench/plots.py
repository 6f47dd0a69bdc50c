"""Plots of the cells as SVG: each world's learning, and TL;DR's front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.paper_bench.arms import ARMS, WORLDS
from studies.paper_bench.data import Done
from studies.paper_bench.evidence import TB_FRONT, Evidence, front_points


def write_plots(evidence: Evidence, folder: Path) -> list[Path]:
    """Draw what there is data for, the same bytes from the same data."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "tba", "font.size": 9})
    from matplotlib import pyplot

    written = []
    for worlds, name, draw in (([*WORLDS], "learning", _learning), (["tldr"], "frontier", _frontier)):
        if not any(done.world in worlds and "curve" in done.result for done in evidence.cells.values()):
            continue
        # the two fronts are to be compared
        is_shared = name == "frontier"
        figure, axes = pyplot.subplots(
            1, max(2, len(worlds)), figsize=(13, 4.2), layout="constrained", sharex=is_shared, sharey=is_shared
        )
        for axis in axes:
            axis.set_prop_cycle(color=pyplot.get_cmap("tab20")(range(20)))
        draw(evidence, axes)
        for axis in axes:
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                beside = {} if name == "learning" else {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
                axis.legend(fontsize=7, **beside)
        written.append(folder / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return written


def _learning(evidence: Evidence, axes: Any) -> None:
    """Reward while training, every run of the recipe as it is shipped and of its control."""
    for axis, world in zip(axes, WORLDS, strict=True):
        recipe = next(arm.name for arm in ARMS if arm.world == world)
        for name, colour in ((recipe, "C0"), ("control", "C2")):
            for number, done in enumerate(evidence.arm(world, name).values()):
                training = done.result["training"]
                rewards = np.array(training["reward_mean"], dtype=float)
                label = None if number else "shuffled rewards" if name == "control" else name
                axis.plot(training["step"], rewards, color=colour, lw=1.2, label=label)
        axis.set_title(f"{world}-small")
        axis.set_xlabel("optimizer step")
        axis.set_ylabel("reward of the batches")


def _frontier(evidence: Evidence, axes: Any) -> None:
    """Win rate against perplexity, the mean of the seeds, one axis per lag of the rivals; a colour is a preset."""
    presets = list(
        dict.fromkeys(arm.name.partition("-lag")[0] for arm in ARMS if arm.lag_steps and arm.world == "tldr")
    )
    colours = {name: f"C{number}" for number, name in enumerate(["tb", *(name for name in presets if name != "tb")])}
    looks = {"tb-beta0.2": "--", "tb-beta0.0125": ":"}
    for axis, lag in zip(axes, (15, 1), strict=True):
        names = [*TB_FRONT, *(arm.name for arm in ARMS if arm.world == "tldr" and arm.lag_steps == lag)]
        start, by_arm = _of_one_set(evidence, "tldr", names)
        for name, cells in by_arm.items():
            # a run that ended early has fewer points
            num = len(WORLDS["tldr"].middle_steps) + 1
            points = [points for done in cells if len(points := front_points(done)) == num]
            if points:
                line = np.mean(points, axis=0)
                if start is not None and (first := front_points(start)):
                    line = np.concatenate([first, line])
                is_tb = name.startswith("tb")
                style = {"color": colours["tb" if is_tb else name.partition("-lag")[0]], "ms": 3 + 2 * is_tb}
                look = looks.get(name, "-")
                axis.plot(*line.T, look, marker="o", lw=1 + is_tb, label=_label(name, points, cells), **style)
        axis.set_title(f"summaries: tb, and rivals at lag {lag}")
        axis.set_xlabel("perplexity per token under the starting model")
        axis.set_ylabel("win rate against references, gold judge")


def _of_one_set(evidence: Evidence, world: str, names: Sequence[str]) -> tuple[Done | None, dict[str, list[Done]]]:
    """Return starting model and cells by arm, of the set of models with most of these arms.

    Runs from other models began elsewhere, and their distances are measured in other embeddings.
    """
    found = {name: evidence.arm(world, name) for name in names}
    num_arms = Counter(models for cells in found.values() for models in {models for models, _ in cells})
    if not num_arms:
        return None, {}
    ((most, _),) = num_arms.most_common(1)
    by_arm = {name: [done for (of, _), done in cells.items() if of == most] for name, cells in found.items()}
    return evidence.starts(world).get(most), {name: cells for name, cells in by_arm.items() if cells}


def _label(name: str, drawn: Sequence[Any], cells: Sequence[Done]) -> str:
    """Return the name in the legend; says how many runs are drawn where it is not all."""
    return name if len(drawn) == len(cells) else f"{name} ({len(drawn)} of {len(cells)} runs)"
