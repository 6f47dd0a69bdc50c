"""Cells: what is run, in which order. A cell that has a line in the data file is never run again.

The order is that of what decides most: tuning; lag 16 and 1, five seeds of the methods that did well in tuning and two
of the others; then seed by seed everything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.study.methods import LEARNING_RATES, METHODS

NUM_STEPS = 150
TUNE_LAG = 16
TUNE_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
FINAL_POINTS = 3
"""Final accuracy is the mean of the last three evaluations (steps 130, 140, 150)."""
LAGS_FIRST, LAGS_THEN = (16, 1), (64, 4, 0)
CONTENDER_MARGIN = 0.05
"""Methods whose tuned accuracy is this close to the best are run first; it decides the order and nothing else."""
REPLAY_M, REPLAY_LAG = 0.5, 16
M_VALUES, M_METHODS, M_LAG = (0.0, 0.25, 0.75, 1.0), ("tba_prime", "tb"), 4
K_VALUES = (2, 4, 8, 16, 32)
SCALING_BETAS = ((0.01, None), (0.05, None), (0.2, None), (0.2, 0.02))
"""beta, and what it jumps to half-way."""
SMALL_SEEDS = (0, 1, 2)

Scaling = Literal["a_form", "raw"]
SCALINGS: tuple[Scaling, ...] = ("a_form", "raw")
Kind = Literal["tune", "lag", "second", "replay", "m", "k", "scaling"]
"""`second`: at lag 16 with the setting that came second in tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the data file."""

    kind: Kind
    method: str
    lag: int
    learning_rate: float
    beta: float
    seed: int
    most_on_policy_prob: float | None = None
    group_size: int = 8
    scaling: Scaling = "a_form"
    """`raw`: the gradient is multiplied by 2 / beta^2 before it is clipped, as the paper's loss has it."""
    beta_then: float | None = None
    """Half-way the beta jumps to this."""

    @property
    def key(self) -> str:
        """The cell's name: everything that decides its result."""
        parts = [self.kind, self.method, f"lag{self.lag}", f"lr{self.learning_rate:g}", f"beta{self.beta:g}"]
        if self.beta_then is not None:
            parts.append(f"then{self.beta_then:g}")
        if self.most_on_policy_prob is not None:
            parts.append(f"m{self.most_on_policy_prob:g}")
        if self.group_size != 8:
            parts.append(f"K{self.group_size}")
        if self.scaling != "a_form":
            parts.append(self.scaling)
        return "/".join([*parts, f"seed{self.seed}"])

    def document(self) -> dict[str, Any]:
        """Return the cell as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A finished cell."""

    cell: Cell
    result: Mapping[str, Any]

    @property
    def final(self) -> float:
        """Mean sampled accuracy of the last points; a run that was not finite any more counts as 0."""
        return 0.0 if self.broke else _mean(self.result["curve"]["sampled"][-FINAL_POINTS:])

    @property
    def final_greedy(self) -> float:
        """The same for greedy accuracy."""
        return 0.0 if self.broke else _mean(self.result["curve"]["greedy"][-FINAL_POINTS:])

    @property
    def best(self) -> float:
        """Best sampled accuracy of the run."""
        return max(self.result["curve"]["sampled"])

    @property
    def start(self) -> float:
        """Sampled accuracy of the starting model."""
        return self.result["curve"]["sampled"][0]

    @property
    def broke(self) -> bool:
        """Loss or gradient was not finite, or (tuning only) the run was given up."""
        return self.result["num_steps_done"] < self.result["num_steps"]

    @property
    def collapsed(self) -> bool:
        """The final accuracy is below the start's, or below 0.8 of the run's best."""
        return self.final < self.start or self.final < 0.8 * self.best


def plan(lines: Mapping[str, Line]) -> Iterator[Cell]:
    """Cells that can be run now, best first, those that have a line left out. Run the first and ask again."""
    return (cell for cell in ordered(lines) if cell.key not in lines)


def ordered(lines: Mapping[str, Line]) -> Iterator[Cell]:
    """All cells that are known so far, each once. A method's cells after tuning are known once it is tuned."""
    return iter({cell.key: cell for cell in _ordered(lines)}.values())


def _ordered(lines: Mapping[str, Line]) -> Iterator[Cell]:
    for method in METHODS:
        yield from tuning(method)
    first, others = contenders(lines)
    yield from _of(lines, "lag", SEEDS[:1], LAGS_FIRST[:1], tuple(METHODS))
    yield from _of(lines, "lag", SEEDS, LAGS_FIRST, first)
    yield from _of(lines, "lag", SEEDS[:2], LAGS_FIRST, others)
    yield from _gradient_noise()
    yield from _of(lines, "second", SEEDS[:3], LAGS_FIRST[:1], first)
    for seed in SEEDS:
        for methods in (first, others):
            yield from _of(lines, "lag", (seed,), LAGS_FIRST + LAGS_THEN, methods)
            yield from _of(lines, "replay", (seed,), (REPLAY_LAG,), methods)
            if methods == first and seed in SMALL_SEEDS:
                yield from _most_on_policy(seed, lines)
                yield from _scaling(seed)


def contenders(lines: Mapping[str, Line]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Methods close to the best in tuning, and the others."""
    best = {method: max(lines[cell.key].final for cell in tuning(method)) for method in METHODS if tuned(method, lines)}
    bar = max(best.values(), default=0.0) - CONTENDER_MARGIN
    first = tuple(method for method in best if best[method] >= bar)
    return first, tuple(method for method in METHODS if method not in first)


def tuning(method: str) -> list[Cell]:
    """Six settings on the tuning seed."""
    return [
        Cell(kind="tune", method=method, lag=TUNE_LAG, learning_rate=rate, beta=beta, seed=TUNE_SEED)
        for rate in LEARNING_RATES
        for beta in METHODS[method].betas
    ]


def tuned(method: str, lines: Mapping[str, Line], *, rank: int = 0) -> tuple[float, float] | None:
    """(learning rate, beta) of the best of them (rank 1: of the next best); None: not all are done."""
    cells = tuning(method)
    if any(cell.key not in lines for cell in cells):
        return None
    chosen = sorted(cells, key=lambda cell: -lines[cell.key].final)[rank]
    return chosen.learning_rate, chosen.beta


def _of(
    lines: Mapping[str, Line], kind: Kind, seeds: Iterable[int], lags: Iterable[int], methods: Iterable[str]
) -> Iterator[Cell]:
    for seed, lag, method in itertools.product(seeds, lags, methods):
        if (setting := tuned(method, lines, rank=int(kind == "second"))) is not None:
            yield Cell(
                kind=kind,
                method=method,
                lag=lag,
                learning_rate=setting[0],
                beta=setting[1],
                seed=seed,
                most_on_policy_prob=REPLAY_M if kind == "replay" else None,
            )


def _gradient_noise() -> Iterator[Cell]:
    """C6 of algorithm.md, section 10: K at a fixed batch."""
    for seed, k in itertools.product(SMALL_SEEDS, K_VALUES):
        yield Cell(kind="k", method="tb", lag=0, learning_rate=0.0, beta=0.05, seed=seed, group_size=k)


def _most_on_policy(seed: int, lines: Mapping[str, Line]) -> Iterator[Cell]:
    """C5: m with a replay buffer."""
    for m, method in itertools.product(M_VALUES, M_METHODS):
        if (setting := tuned(method, lines)) is not None:
            rate, beta = setting
            yield Cell(
                kind="m",
                method=method,
                lag=M_LAG,
                learning_rate=rate,
                beta=beta,
                seed=seed,
                most_on_policy_prob=m,
            )


def _scaling(seed: int) -> Iterator[Cell]:
    """C7: beta, and the A-form beside the raw scale."""
    for beta, then in SCALING_BETAS:
        for scaling in SCALINGS:
            yield Cell(
                kind="scaling",
                method="tb",
                lag=1,
                learning_rate=2.5e-4,
                beta=beta,
                seed=seed,
                scaling=scaling,
                beta_then=then,
            )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
