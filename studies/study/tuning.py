"""Tuning: the setting of a method in one world, on seeds that are used for nothing else.

The grid has a factor of 2 between learning rates and of 4 between betas. It grows around its best point: a method is
tuned when the neighbours of the best setting in every direction have been run on every seed and none is better. So the
best point is never at the edge of what was tried. Best is the largest mean area under the curve. A method that still
moves after MAX_SETTINGS settings is given up there: the best so far is taken, and the tables say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from studies.study.cells import Cell, Line, Setting, World, cells_of, mean
from studies.study.methods import METHODS

SEEDS = (100, 101, 102)
RATE_FACTOR, BETA_FACTOR = 2.0, 4.0
MAX_SETTINGS = 24
Lines = Mapping[str, Line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Where the tuning of a method in a world stands."""

    todo: tuple[Cell, ...]
    """Cells that can be run now; none are left when it is done."""
    best: Setting
    """The best of the settings that are complete, or where it begins."""
    scores: Mapping[Setting, float]
    """Mean area of the complete ones."""
    is_inside: bool
    """Whether every neighbour of the best one has been tried; False with nothing left to run: given up."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to run."""
        return not self.todo


def tune(lines: Lines, method: str, world: World, begin: Setting | None = None) -> Tuning:
    """Where it stands, a function of the finished cells.

    Args:
        begin: the first setting, such as the best one of another lag; None: the method's.
    """
    begin = begin or Setting(learning_rate=METHODS[method].learning_rate, beta=METHODS[method].beta)
    scores: dict[Setting, float] = {}
    best = begin
    while True:
        wanted = [setting for setting in (best, *neighbours(best)) if setting not in scores]
        is_full = len(scores) + len(wanted) > MAX_SETTINGS
        if not wanted or is_full:
            return Tuning(todo=(), best=best, scores=scores, is_inside=not wanted)
        cells = [cell for setting in wanted for cell in cells_of(method, world, setting, SEEDS)]
        if todo := tuple(cell for cell in cells if cell.key not in lines):
            return Tuning(todo=todo, best=best, scores=scores, is_inside=False)
        for setting in wanted:
            scores[setting] = mean([lines[cell.key].area for cell in cells_of(method, world, setting, SEEDS)])
        best = max(scores, key=lambda setting: scores[setting])


def neighbours(setting: Setting) -> list[Setting]:
    """One step of the grid in every direction."""
    rate, beta = setting.learning_rate, setting.beta
    found = [Setting(learning_rate=_tidy(rate * factor), beta=beta) for factor in (RATE_FACTOR, 1 / RATE_FACTOR)]
    if beta:
        found += [Setting(learning_rate=rate, beta=_tidy(beta * factor)) for factor in (BETA_FACTOR, 1 / BETA_FACTOR)]
    return found


def _tidy(value: float) -> float:
    """The same point of the grid is the same number, however it was reached."""
    return float(f"{value:.6g}")
