"""One run of one side as a line of the data file, and the times that follow from its curve."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from studies.accuracy import reached
from studies.data_file import append_line, read_lines

Side = Literal["tba", "trl"]
Unit = Literal["seconds", "cpu_s", "step"]
Schedule = Literal["constant", "linear"]
"""Of the learning rate; `linear` falls to 0 at the last step, which is TRL's default."""
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear")
TUNING_SEEDS = (100, 101, 102)
"""Used for nothing but the choice of learning rates."""
SEEDS = (0, 1, 2, 3, 4)
MORE_SEEDS = (5, 6, 7, 8, 9)
"""For a comparison that was chosen after another one was seen."""


class Rate(NamedTuple):
    """A learning rate with its schedule."""

    value: float
    schedule: Schedule = "constant"

    def __str__(self) -> str:
        return f"{self.value:g} {self.schedule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run."""

    workload: str
    side: Side
    learning_rate: float
    seed: int
    num_steps: int
    schedule: Schedule = "constant"
    settings: tuple[str, ...] = ()
    """`--set` arguments of tba, beside the workload's."""
    group_size: int = 8
    """Responses to each prompt of a step; sides are compared where it is the same."""
    source: str
    """Digest of the code and the recipe that decide the result of this side."""

    @property
    def rate(self) -> Rate:
        """What tuning chooses."""
        return Rate(self.learning_rate, self.schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The weights after one step. Seconds and CPU seconds are those of the clock (studies/time_to_target.py)."""

    step: int
    seconds: float
    cpu_s: float
    pass_at_1: float
    greedy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out."""

    cell: Cell
    points: tuple[Point, ...]
    seconds_per_step: float
    """The median of the second half of the run: the first steps fill caches and buffers."""
    cpu_s_per_step: float
    """The mean of the second half, of all processes of the side."""
    num_generated: int
    """Rollouts."""
    response_tokens_mean: float
    starts: dict[str, float] = field(default_factory=dict)
    """Other begins of the clock, in seconds before (positive) or after (negative) its own."""
    versions: dict[str, str] = field(default_factory=dict)
    at_s: float = 0.0

    def to_target(self, target: float, of: Unit = "seconds") -> float | None:
        """Return when pass@1 first reached the target, on the line between two points; None: never."""
        return reached([(getattr(point, of), point.pass_at_1) for point in self.points], target)

    @property
    def last(self) -> float:
        """Mean pass@1 of the last three points."""
        tail = self.points[-3:]
        return sum(point.pass_at_1 for point in tail) / len(tail)


def read_results(path: Path) -> dict[Cell, Result]:
    """Return the results of the data file in its order; the last line of a cell counts."""
    found: dict[Cell, Result] = {}
    for line in read_lines(path):
        cell = Cell(**{**line["cell"], "settings": tuple(line["cell"]["settings"])})
        points = tuple(Point(**point) for point in line["points"])
        others = {name: line[name] for name in Result.__dataclass_fields__ if name not in ("cell", "points")}
        found.pop(cell, None)
        found[cell] = Result(cell=cell, points=points, **others)
    return found


def append_result(path: Path, result: Result) -> None:
    """Add one line."""
    append_line(path, asdict(result))
