"""A cell is one run: everything that decides its result. One that has a line in the data file is never run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FINAL_POINTS = 3
"""Final accuracy is the mean of the last three evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The conditions of a run: what is not the method, its setting or the seed."""

    task: str = "addition"
    lag: int = 0
    """Optimizer steps between the behaviour policy and theta."""
    num_steps: int = 0
    """0: the task's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What tuning chooses."""

    learning_rate: float
    beta: float = 0.0

    def __str__(self) -> str:
        return f"{self.learning_rate:.3g}" + (f" / {self.beta:.3g}" if self.beta else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the data file."""

    method: str
    world: World
    setting: Setting
    seed: int

    @property
    def key(self) -> str:
        """The cell's name: everything that decides its result."""
        world, setting = self.world, self.setting
        length = f"num_steps={world.num_steps}/" if world.num_steps else ""
        run = f"{world.task}/{self.method}/lag{world.lag}/{length}"
        return f"{run}lr{setting.learning_rate:.6g}/beta{setting.beta:.6g}/seed{self.seed}"

    def document(self) -> dict[str, Any]:
        """Return the cell as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Cell:
        """Read what `document` returned."""
        world, setting = World(**document["world"]), Setting(**document["setting"])
        return cls(method=document["method"], world=world, setting=setting, seed=document["seed"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A finished cell."""

    cell: Cell
    result: Mapping[str, Any]

    @property
    def area(self) -> float:
        """Area under the curve of sampled accuracy: its mean over the run, by the trapezoid rule."""
        return self._area("sampled")

    @property
    def area_greedy(self) -> float:
        """The same of greedy accuracy."""
        return self._area("greedy")

    @property
    def final(self) -> float:
        """Mean sampled accuracy of the last points; a run that was not finite any more counts as 0."""
        return 0.0 if self.broke else mean(self.result["curve"]["sampled"][-FINAL_POINTS:])

    @property
    def final_greedy(self) -> float:
        """The same for greedy accuracy."""
        return 0.0 if self.broke else mean(self.result["curve"]["greedy"][-FINAL_POINTS:])

    @property
    def broke(self) -> bool:
        """Loss or gradient was not finite, or (tuning only) the run was given up."""
        return self.result["num_steps_done"] < self.result["num_steps"]

    @property
    def collapsed(self) -> bool:
        """The final accuracy is below the start's, or below 0.8 of the run's best."""
        sampled = self.result["curve"]["sampled"]
        return self.final < sampled[0] or self.final < 0.8 * max(sampled)

    @property
    def clip_share(self) -> float:
        """Share of steps whose gradient was clipped."""
        return self.result["clip_share"]

    def mean_of(self, name: str) -> float | None:
        """Mean of a column of the curve over the second half of the run; None: unknown throughout."""
        values = self.result["curve"][name]
        known = [value for value in values[len(values) // 2 :] if value is not None]
        return mean(known) if known else None

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a curve to the end of the run; after it broke the values are 0."""
        steps, values = list(self.result["curve"]["step"]), list(self.result["curve"][name])
        if self.broke:  # nothing is left of it from there on
            steps, values = [*steps, steps[-1] + 1, self.result["num_steps"]], [*values, 0.0, 0.0]
        return steps, values

    def _area(self, name: str) -> float:
        steps, values = self.points(name)
        pairs = zip(zip(steps, values, strict=True), zip(steps[1:], values[1:], strict=True), strict=False)
        return sum((right - left) * (a + b) / 2 for (left, a), (right, b) in pairs) / (steps[-1] or 1)


def cells_of(method: str, world: World, setting: Setting, seeds: Sequence[int]) -> list[Cell]:
    """The same run with each seed."""
    return [Cell(method=method, world=world, setting=setting, seed=seed) for seed in seeds]


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)
