"""What is run, and why: the arms of every question, the most decisive first.

An arm is a method in a world with the setting that tuning found, on the five seeds of the result. The plan yields the
cells that can be run now; which ones come next may depend on them (the grids of tuning, the choice after screening).

    first      the methods FIRST on `addition`, at the lags that tell them apart; then whether replay pays for FEW[0]
    questions  K, wrong rewards, beta, raw scale, priority, m and k, log Z, the rest of replay, gradient noise
    screening  every method at lag 16, 80 steps, two of the tuning seeds, each tuned by the same rule
    rule       the methods ALWAYS, and of the others those with the largest area in screening, NUM_FULL in all, and
               CHAIN_METHODS are compared at every lag on `addition`; CHAIN_METHODS alone on `chain`, where a cell
               costs five to ten times as much
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from studies.study.cells import Cell, Line, Priority, Setting, World, cells_of
from studies.study.methods import ALWAYS, METHODS
from studies.study.tuning import Lines, Tuning, tune

SEEDS = (0, 1, 2, 3, 4)
NUM_FULL = 9
SCREENING, NUM_SCREENING_SEEDS = World(lag=16, num_steps=80), 2
LAGS = (0, 1, 4, 16, 64)
FIRST, FIRST_LAGS = ALWAYS[:3], (16, 0, 64)
CHAIN_METHODS = ("tba_prime", "grpo", "tb_positive", "raft")
"""The default, what others use, and the two that old data does not harm on `addition`."""
BASE_LAG = 16
"""Tuned first; tuning in other worlds of the task begins where it ended, and that of `chain` where `addition` did."""
LAG = 4
"""Of the questions that are not about lag."""
FEW = ("tba_prime", "grpo")
"""The methods of those questions."""
IMITATING = ("tb_positive", "raft")
"""Methods without the pull of rollouts below the baseline; beside FEW where old data is what is asked about."""
SAMPLING = (*FEW, "tb_positive")
"""The methods of the questions about m, k, K and the priority: FEW, and that of the quickstart."""
SAMPLES_PER_INSERT = (1, 2, 4, 8)
REPLAY = World(lag=LAG, replay_m=0.5, num_steps=300)
PRIORITIES: tuple[Priority, ...] = ("off", "reward", "age", "reward_age")
M_VALUES, SYNC_INTERVALS = (0.0, 0.25, 0.5, 0.75, 1.0), (1, 4, 16)
GROUP_SIZES = (2, 4, 8, 16, 32)
CORRECTIONS = (
    *(f"{name}{how}" for name in ("grpo", "dr_grpo") for how in ("", "_truncate", "_mask", "_uncorrected")),
    *("tba_prime", "tba_prime_unweighted"),
)
CORRECTION_LAGS = (16, 64)
FLIPS = (0.05, 0.1, 0.2)
EPOCHS_STEPS = 600
"""3.2 epochs of the 3,000 prompts of `addition`."""
BETA_METHODS = ("tba_prime", "tb")
BETAS = ((1 / 16, None), (1 / 4, None), (1.0, None), (4.0, None), (4.0, 1 / 4), (1 / 4, 4.0))
"""Times the tuned one; and where it goes over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One entry of a question's table."""

    method: str
    world: World
    tuned_in: World
    """The world whose tuned setting it has."""
    tuned_as: str = ""
    """The method whose tuned setting it has, if not its own."""
    beta_factor: float = 1.0
    beta_end_factor: float | None = None

    def cells(self, setting: Setting) -> list[Cell]:
        """Its cells, given the tuned setting."""
        world = self.world
        if self.beta_end_factor is not None:
            world = replace(world, beta_end=float(f"{setting.beta * self.beta_end_factor:.6g}"))
        beta = float(f"{setting.beta * self.beta_factor:.6g}")
        return cells_of(self.method, world, replace(setting, beta=beta), SEEDS)


class Study:
    """Everything that follows from the finished cells."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._tunings: dict[tuple[str, World], Tuning | None] = {}

    def plan(self) -> Iterator[Cell]:
        """Cells that can be run now, best first, each once."""
        cells = (cell for part in self._parts() for cell in part)
        return iter({cell.key: cell for cell in cells if cell.key not in self.lines}.values())

    def found(self, arm: Arm) -> dict[int, Line]:
        """Finished cells of an arm, by seed."""
        tuning = self.tuning(arm.tuned_as or arm.method, arm.tuned_in)
        if tuning is None or not tuning.is_done:
            return {}
        cells = arm.cells(tuning.best)
        return {cell.seed: self.lines[cell.key] for cell in cells if cell.key in self.lines}

    def tuning(self, method: str, world: World) -> Tuning | None:
        """The tuning of a method in a world; None: the one that it begins from is not done."""
        key = method, world
        if key not in self._tunings:
            self._tunings[key] = self._tune(method, world)
        return self._tunings[key]

    def screened(self) -> dict[str, Tuning]:
        """Methods whose screening is done, best first."""
        found = {method: self.tuning(method, SCREENING) for method in METHODS}
        done = {method: tuning for method, tuning in found.items() if tuning is not None and tuning.is_done}
        return dict(sorted(done.items(), key=lambda item: -max(item[1].scores.values())))

    def full(self) -> tuple[str, ...]:
        """The methods of the full comparison; until screening is done, ALWAYS."""
        if len(ranked := self.screened()) < len(METHODS):
            return ALWAYS
        others = [method for method in ranked if method not in ALWAYS]
        return (*ALWAYS, *others[: NUM_FULL - len(ALWAYS)])

    def compared(self, task: str) -> tuple[str, ...]:
        """The methods that are compared on a task."""
        others = [method for method in self.full() if method not in CHAIN_METHODS]
        return CHAIN_METHODS if task == "chain" else (*CHAIN_METHODS, *others)

    def at_lag(self, task: str, lag: int) -> list[Arm]:
        """Which objective at which lag."""
        return [_tuned_arm(method, World(task=task, lag=lag)) for method in self.compared(task)]

    def _tune(self, method: str, world: World) -> Tuning | None:
        if (before := _begins_from(world)) is None:
            seeds = NUM_SCREENING_SEEDS if world == SCREENING else 3
            return tune(self.lines, method, world, num_seeds=seeds)
        begin = self.tuning(method, before)
        return None if begin is None or not begin.is_done else tune(self.lines, method, world, begin.best)

    def _parts(self) -> Iterator[Iterator[Cell]]:
        first = ([_tuned_arm(method, World(lag=lag)) for method in FIRST] for lag in FIRST_LAGS)
        replay = replay_arms()
        first_replay = [arm for arm in replay if arm.method == FEW[0]]
        about_learning = group_size_arms(), hazard_arms(), beta_arms(), scale_arms()
        about_sampling = priority_arms(), sync_arms()
        for arms in (*first, first_replay, *about_learning, *about_sampling, log_z_arms(), replay):
            yield (cell for arm in arms for cell in self._arm_cells(arm))
        yield iter(noise_cells())
        for method in METHODS:
            yield self._tuning_cells(method, SCREENING)
        if len(self.screened()) < len(METHODS):
            return
        for arms in self._arms_in_order():
            yield (cell for arm in arms for cell in self._arm_cells(arm))

    def _arms_in_order(self) -> Iterator[list[Arm]]:
        for lag in FIRST_LAGS:
            yield self.at_lag("addition", lag)
            yield self.at_lag("chain", lag)
        yield correction_arms()
        for lag in (4, 1):
            yield self.at_lag("addition", lag)
            yield self.at_lag("chain", lag)

    def _arm_cells(self, arm: Arm) -> Iterator[Cell]:
        tuned = arm.tuned_as or arm.method
        yield from self._tuning_cells(tuned, arm.tuned_in)
        tuning = self.tuning(tuned, arm.tuned_in)
        if tuning is not None and tuning.is_done:
            yield from arm.cells(tuning.best)

    def _tuning_cells(self, method: str, world: World) -> Iterator[Cell]:
        if (before := _begins_from(world)) is not None:
            yield from self._tuning_cells(method, before)
        if (tuning := self.tuning(method, world)) is not None:
            yield from tuning.todo


def plan(lines: Lines) -> Iterator[Cell]:
    """Cells that can be run now, best first."""
    return Study(lines).plan()


def replay_arms() -> list[Arm]:
    """Does replay pay: no buffer, then by samples per insert."""
    worlds = [World(lag=LAG, num_steps=REPLAY.num_steps)]
    worlds += [replace(REPLAY, samples_per_insert=num) for num in SAMPLES_PER_INSERT]
    return [_tuned_arm(method, world) for world in worlds for method in (*FEW, *IMITATING)]


def priority_arms() -> list[Arm]:
    """Which rollouts replay slots prefer, at four trained per generated."""
    plain = replace(REPLAY, samples_per_insert=4)
    return [
        Arm(method=method, world=replace(plain, priority=priority), tuned_in=plain)
        for priority in PRIORITIES
        for method in SAMPLING
    ]


def sync_arms() -> list[Arm]:
    """m and the sync interval k, at two trained per generated."""
    plain = World(replay_m=0.5, samples_per_insert=2, sync_interval=4)
    return [
        Arm(method=method, world=replace(plain, replay_m=m, sync_interval=k), tuned_in=plain)
        for k in SYNC_INTERVALS
        for m in M_VALUES
        for method in SAMPLING
    ]


def group_size_arms() -> list[Arm]:
    """K at 128 rollouts a batch."""
    plain = World(lag=LAG)
    return [
        Arm(method=method, world=replace(plain, group_size=size), tuned_in=plain)
        for size in GROUP_SIZES
        for method in SAMPLING
    ]


def noise_cells() -> list[Cell]:
    """The noise of TB's gradient on-policy, by K."""
    still = Setting(learning_rate=0.0, beta=0.05)
    return [cell for size in GROUP_SIZES for cell in cells_of("tb", World(group_size=size), still, SEEDS)]


def correction_arms() -> list[Arm]:
    """Ways to correct the delay, and none."""
    return [_tuned_arm(method, World(lag=lag)) for lag in CORRECTION_LAGS for method in CORRECTIONS]


def hazard_arms() -> list[Arm]:
    """Wrong rewards, without a buffer and with one."""
    plain = World(lag=LAG)
    hazards = [replace(plain, hazard="flips", hazard_prob=prob) for prob in FLIPS]
    worlds = [plain, *hazards, replace(plain, hazard="hack")]
    return [
        Arm(method=method, world=replace(world, replay_m=m), tuned_in=replace(plain, replay_m=m))
        for m in (None, 0.5)
        for world in worlds
        for method in (*FEW, *IMITATING)
    ]


def beta_arms() -> list[Arm]:
    """beta about the tuned one, constant and moving, at the learning rate that was tuned with it."""
    plain = World(lag=LAG)
    return [
        Arm(method=method, world=plain, tuned_in=plain, beta_factor=factor, beta_end_factor=end)
        for factor, end in BETAS
        for method in BETA_METHODS
    ]


def scale_arms() -> list[Arm]:
    """The A-form beside the raw scale, without a clip: at a constant beta, and at one that falls."""
    plain = World(lag=LAG, clip="none")
    return [
        Arm(
            method="tb",
            world=replace(plain, is_raw=is_raw),
            tuned_in=plain,
            beta_factor=factor,
            beta_end_factor=end,
        )
        for factor, end in ((1.0, None), (4.0, 1 / 4))
        for is_raw in (False, True)
    ]


def log_z_arms() -> list[Arm]:
    """VarGrad beside a running log Z per prompt, over EPOCHS_STEPS: before the second epoch both are the same."""
    plain = World(lag=LAG)
    return [
        Arm(method=method, world=replace(plain, num_steps=EPOCHS_STEPS), tuned_in=plain, tuned_as="tb")
        for method in ("tb", "tb_log_z")
    ]


def _tuned_arm(method: str, world: World) -> Arm:
    return Arm(method=method, world=world, tuned_in=world)


def _begins_from(world: World) -> World | None:
    base, first = World(task=world.task, lag=BASE_LAG), World(lag=BASE_LAG)
    if world in (SCREENING, first):
        return None
    return first if world == base else base
