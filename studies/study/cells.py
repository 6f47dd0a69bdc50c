"""A cell is one run: everything that decides its result, and nothing about the question that asked for it.

So a run that two questions need is made once. A cell that has a line in the data file is never run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

FINAL_POINTS = 3
"""Final accuracy is the mean of the last three evaluations."""

Priority = Literal["off", "reward", "age", "reward_age"]
Hazard = Literal["none", "flips", "hack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The conditions of a run: what is not the method, its setting or the seed."""

    task: str = "addition"
    lag: int = 0
    """Optimizer steps between the behaviour policy and theta."""
    num_steps: int = 0
    """0: the task's."""
    sync_interval: int = 1
    """k: the behaviour policy changes every so many steps."""
    replay_m: float | None = None
    """None: every rollout is trained on once, in order. Else: a buffer keeps all of them and MOP draws with this m."""
    samples_per_insert: int = 1
    """Rollouts trained per rollout generated, with the buffer: a step generates 128 / this."""
    priority: Priority = "off"
    group_size: int = 8
    """K, at 128 rollouts a batch."""
    hazard: Hazard = "none"
    """`flips`: every reward is wrong with `hazard_prob`, once and for all. `hack`: for the first half of the run the
    scorer also passes every answer that begins with 0."""
    hazard_prob: float = 0.0
    clip: Literal["relative", "none"] = "relative"
    """Of gradients: the product's default, or none."""
    is_raw: bool = False
    """The gradient is multiplied by 2 / beta^2, as the paper's loss has it. Only without a clip."""
    beta_end: float | None = None
    """beta goes linearly to this over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What tuning chooses."""

    learning_rate: float
    beta: float = 0.0

    def __str__(self) -> str:
        return f"{self.learning_rate:.3g}" + (f" / {self.beta:.3g}" if self.beta else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the data file. Learning rate 0: no run, the noise of the gradient is measured (gradients.py)."""

    method: str
    world: World
    setting: Setting
    seed: int

    @property
    def key(self) -> str:
        """The cell's name: everything that decides its result."""
        parts = [self.world.task, self.method, f"lag{self.world.lag}"]
        for part in fields(World):
            value = getattr(self.world, part.name)
            if part.name not in ("task", "lag") and value != part.default:
                parts.append(f"{part.name}={value:g}" if isinstance(value, int | float) else f"{part.name}={value}")
        setting = self.setting
        return "/".join([*parts, f"lr{setting.learning_rate:.6g}", f"beta{setting.beta:.6g}", f"seed{self.seed}"])

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

    def first_step_at(self, target: float) -> int | None:
        """The first step of a measured point from which sampled accuracy is at the target; None: never."""
        curve = self.result["curve"]
        return next(
            (step for step, value in zip(curve["step"], curve["sampled"], strict=True) if value >= target), None
        )

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


def with_lag(world: World, lag: int) -> World:
    """The same world at another lag."""
    return replace(world, lag=lag)


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)
