"""What is run, and why: every method at every lag, the lags that tell methods apart first.

An arm is a method in a world with the setting that tuning found, on the five seeds of the result. The plan yields the
cells that can be run now; which ones come next depends on them (the grids of tuning).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from studies.study.cells import Cell, Line, Setting, World, cells_of
from studies.study.methods import METHODS
from studies.study.tuning import Lines, Tuning, tune

SEEDS = (0, 1, 2, 3, 4)
LAGS = (0, 1, 4, 16, 64)
LAGS_IN_ORDER = (16, 0, 64, 4, 1)
COMPARED = {"addition": tuple(METHODS), "chain": ("tba_prime", "grpo", "tb_positive", "raft")}
"""By task. A cell of `chain` costs five to ten times as much: there the default, what others use, and the two that old
data does not harm on `addition`."""
BASE_LAG = 16
"""Tuned first; tuning in other worlds of the task begins where it ended, and that of `chain` where `addition` did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One entry of a table."""

    method: str
    world: World

    def cells(self, setting: Setting) -> list[Cell]:
        """Its cells, given the tuned setting."""
        return cells_of(self.method, self.world, setting, SEEDS)


class Study:
    """Everything that follows from the finished cells."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._tunings: dict[Arm, Tuning | None] = {}

    def plan(self) -> Iterator[Cell]:
        """Cells that can be run now, best first, each once."""
        arms = (arm for lag in LAGS_IN_ORDER for task in COMPARED for arm in at_lag(task, lag))
        cells = (cell for arm in arms for cell in self._arm_cells(arm))
        return iter({cell.key: cell for cell in cells if cell.key not in self.lines}.values())

    def found(self, arm: Arm) -> dict[int, Line]:
        """Finished cells of an arm, by seed."""
        tuning = self.tuning(arm)
        if tuning is None or not tuning.is_done:
            return {}
        return {cell.seed: self.lines[cell.key] for cell in arm.cells(tuning.best) if cell.key in self.lines}

    def tuning(self, arm: Arm) -> Tuning | None:
        """The tuning of an arm; None: the one that it begins from is not done."""
        if arm not in self._tunings:
            self._tunings[arm] = self._tune(arm)
        return self._tunings[arm]

    def _tune(self, arm: Arm) -> Tuning | None:
        if (before := _begins_from(arm)) is None:
            return tune(self.lines, arm.method, arm.world)
        begin = self.tuning(before)
        return None if begin is None or not begin.is_done else tune(self.lines, arm.method, arm.world, begin.best)

    def _arm_cells(self, arm: Arm) -> Iterator[Cell]:
        yield from self._tuning_cells(arm)
        tuning = self.tuning(arm)
        if tuning is not None and tuning.is_done:
            yield from arm.cells(tuning.best)

    def _tuning_cells(self, arm: Arm) -> Iterator[Cell]:
        if (before := _begins_from(arm)) is not None:
            yield from self._tuning_cells(before)
        if (tuning := self.tuning(arm)) is not None:
            yield from tuning.todo


def at_lag(task: str, lag: int) -> list[Arm]:
    """Which objective at which lag."""
    return [Arm(method=method, world=World(task=task, lag=lag)) for method in COMPARED[task]]


def _begins_from(arm: Arm) -> Arm | None:
    base, first = World(task=arm.world.task, lag=BASE_LAG), World(lag=BASE_LAG)
    if arm.world == first:
        return None
    return Arm(method=arm.method, world=first if arm.world == base else base)
