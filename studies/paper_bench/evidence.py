"""Figures behind the claims, as pairs of the same seed and models, from the cells here and of the overlap study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.overlap import DATA as OVERLAP_DATA
from studies.overlap import read as read_overlap
from studies.overlap_bench.runs import Cell as OverlapCell
from studies.overlap_bench.tables import is_usable, reached_s
from studies.paper_bench.arms import ARMS, START, WORLDS
from studies.paper_bench.data import Done, Unit, read_cells
from studies.paper_bench.verdicts import Pairs

Figure = Callable[[Done], float | None]
OVERLAP_TARGET = 0.75
TLDR_KL, TLDR_WIN = "sampled.perplexity.per_token", WORLDS["tldr"].metric
TB_FRONT = ("tb", "tb-beta0.2", "tb-beta0.0125")


@dataclass(frozen=True)
class Evidence:
    """All finished cells."""

    cells: Mapping[tuple[str, str], Done]
    """By key and digest of the models."""

    @classmethod
    def of(cls, path: Path) -> Evidence:
        """Read the cells of this benchmark that count; the overlap study's are read when a claim asks."""
        return cls(read_cells(path))

    def arm(self, world: str, name: str) -> dict[Unit, Done]:
        """Return the finished cells of an arm, by models and seed."""
        return {done.unit: done for done in self.cells.values() if (done.world, done.arm) == (world, name)}

    def starts(self, world: str) -> dict[str, Done]:
        """Return the evaluations of the starting models, by the digest of the models."""
        return {models: done for (models, _), done in self.arm(world, START).items()}

    def pairs(self, world: str, ours: str, theirs: str, figure: Figure) -> Pairs:
        """Return the figure of two arms on the models and seeds that both have.

        Runs that were late at their pace are left out, and what has no figure.
        """
        first, second = (
            {unit: done for unit, done in self.arm(world, name).items() if not done.is_late} for name in (ours, theirs)
        )
        found = {}
        for unit in sorted(first.keys() & second.keys()):
            mine, other = figure(first[unit]), figure(second[unit])
            if mine is not None and other is not None:
                found[unit] = mine, other
        return found

    def front(self, lag: int) -> Pairs:
        """Return the win rate on tb's front and on the front of a rival at a lag, TL;DR, where the rival has points.

        A front at a perplexity is the best win rate of any point (KL weights and steps) that is no further from the
        starting model. The starting model is on every front, so no side has less than it. Mean over the points of a
        rival, then over the rivals.
        """
        starts, found = self.starts("tldr"), {}
        # a front of fewer betas would lie lower
        with_tb = set.intersection(*(set(self.arm("tldr", name)) for name in TB_FRONT))
        for unit in sorted(with_tb):
            if unit[0] not in starts or not (first := front_points(starts[unit[0]])):
                continue
            by_preset: dict[str, list[tuple[float, float]]] = {}
            for name in (*TB_FRONT, *self._rivals(lag)):
                done = self.arm("tldr", name).get(unit)
                if done is not None:
                    preset = "tb" if name in TB_FRONT else name.partition("-")[0]
                    by_preset.setdefault(preset, []).extend(front_points(done))
            ours = first + by_preset.pop("tb", [])
            by_rival = [
                _means([(_front_at(kl, ours), _front_at(kl, first + points)) for kl, _ in points])
                for points in by_preset.values()
                if points
            ]
            if len(ours) > 1 and by_rival:
                found[unit] = _means(by_rival)
        return found

    def lost_with_lag(self) -> Pairs:
        """Return the win rate of the rivals at lag 1 and at lag 15, TL;DR, mean over the rivals that have both."""
        names = self._rivals(1)
        return _mean_of([self.pairs("tldr", name, f"{name}5", lambda done: done.value(TLDR_WIN)) for name in names])

    def _rivals(self, lag: int) -> list[str]:
        return [arm.name for arm in ARMS if arm.world == "tldr" and arm.lag_steps == lag and arm.name[:2] != "tb"]

    def exact_ages(self) -> Pairs:
        """Return the share of rollouts whose age is the one that a constant lag says, mean over the arms, and 0.99."""
        lags = {(arm.world, arm.name): arm.lag_steps for arm in ARMS}
        found: dict[int, list[tuple[float, float]]] = {}
        for done in self.cells.values():
            lag = lags.get((done.world, done.arm))
            if lag is not None:
                steps, ages = done.result["steps"], done.result["ages"]
                batch = sum(ages.values()) / steps
                # before there is a version so old, the first one is used
                wanted = dict.fromkeys(range(min(lag, steps)), batch) | {lag: batch * max(0, steps - lag)}
                same = sum(min(count, wanted.get(int(age), 0)) for age, count in ages.items())
                found.setdefault(done.seed, []).append((same / sum(ages.values()), 0.99))
        return {seed: _means(pairs) for seed, pairs in sorted(found.items())}

    def overlap(self, base: tuple[int, bool], mine: tuple[int, bool]) -> Pairs:
        """Return the seconds to the target of two arms of the overlap study, each (searchers, lock-step)."""
        lines = read_overlap(OVERLAP_DATA).lines
        found = {}
        for seed in sorted({cell.seed for cell, _ in lines.values()}):
            seconds = []
            for searchers, lock_step in (base, mine):
                cell = OverlapCell(seed=seed, searchers=searchers, lock_step=lock_step)
                result = lines[cell.key][1] if cell.key in lines else None
                is_known = result is not None and is_usable(result)
                seconds.append(reached_s(result, OVERLAP_TARGET) if is_known and result is not None else None)
            if None not in seconds:
                found[seed] = seconds[0], seconds[1]
        return found


def front_points(done: Done) -> list[tuple[float, float]]:
    """Return (perplexity under the starting model, win rate) of every version that was evaluated."""
    points = [(done.value(TLDR_KL, version), done.value(TLDR_WIN, version)) for version in done.result["evaluations"]]
    return [(kl, win) for kl, win in points if kl is not None and win is not None]


def mean_success(done: Done) -> float | None:
    """Return the metric of the world, mean over the planned versions: how soon and how far.

    A run that ended early stays what it was at its end.
    """
    world = WORLDS[done.world]
    versions = [str(step) if str(step) in done.result["evaluations"] else "last" for step in world.middle_steps]
    values = [done.value(world.metric, version) for version in (*versions, "last")]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _front_at(perplexity: float, points: Sequence[tuple[float, float]]) -> float:
    """Return the best win rate of the points up to a perplexity; the first point always counts."""
    return max(win for kl, win in points if kl <= perplexity or (kl, win) == points[0])


def _mean_of(rivals: Sequence[Pairs]) -> Pairs:
    """Return the mean over the rivals, by models and seed."""
    units = sorted(set().union(*rivals))
    return {unit: _means([pairs[unit] for pairs in rivals if unit in pairs]) for unit in units}


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, second = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    return first, second
