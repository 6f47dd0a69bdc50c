"""Tables of the study. A table holds what is there: a missing cell is a dash, n says how many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from studies.markdown import markdown
from studies.study.cells import Line, mean
from studies.study.plan import COMPARED, LAGS, SEEDS, Arm, Study, at_lag
from studies.study.stats import Interval, difference_interval, estimate, ratio_interval

Found = Mapping[int, Line]


def by_lag(study: Study, task: str, value: Callable[[Line], float | None], how: str = ".3f") -> str:
    """One row per method, one column per lag."""
    return _grid(task, LAGS, lambda arms, lag: _shown([value(line) for line in study.found(arms[lag]).values()], how))


def kept_table(study: Study, task: str) -> str:
    """Area at every lag over the method's own at lag 0, the same seeds."""

    def entry(arms: Mapping[int, Arm], lag: int) -> str:
        late, early = study.found(arms[lag]), study.found(arms[0])
        if not (both := sorted(late.keys() & early.keys())):
            return "-"
        return _range(ratio_interval([late[s].area for s in both], [early[s].area for s in both]), ".0%")

    return _grid(task, [lag for lag in LAGS if lag], entry)


def standings_table(study: Study, task: str, lag: int) -> str:
    """The methods at one lag, best first, with their distance to the best on the same seeds."""
    found = {arm.method: lines for arm in at_lag(task, lag) if (lines := study.found(arm))}
    ranked = sorted(found, key=lambda method: -mean([line.area for line in found[method].values()]))
    rows = []
    for method in ranked:
        lines, best = found[method], found[ranked[0]]
        every, both = list(lines.values()), sorted(lines.keys() & best.keys())
        gap = "-"
        if both and method != ranked[0]:
            gap = _range(difference_interval([lines[s].area for s in both], [best[s].area for s in both]), "+.3f")
        rows.append(
            [
                f"`{method}`",
                _shown([line.area for line in every]),
                gap,
                _shown([line.final for line in every]),
                _shown([line.final_greedy for line in every]),
                f"{mean([line.clip_share for line in every]):.0%}",
                _column(every, "ess", ".2f"),
                _column(every, "age", ".1f"),
                f"{sum(line.collapsed for line in every)} of {len(every)}",
            ]
        )
    to = f"minus `{ranked[0]}`" if ranked else "minus the best"
    return markdown(["", "area", to, "final", "final greedy", "steps clipped", "ESS", "age", "collapsed"], rows)


def tuning_table(study: Study, arms: Iterable[Arm]) -> str:
    """What was tried and taken, and whether the best is inside the grid."""
    rows = []
    for arm in arms:
        tuning = study.tuning(arm)
        if tuning is None or not tuning.is_done:
            continue
        ordered = sorted(tuning.scores.items(), key=lambda item: (item[0].beta, item[0].learning_rate))
        tried = "; ".join(f"{setting}: {score:.3f}" for setting, score in ordered)
        inside, where = "yes" if tuning.is_inside else "**given up**", f"{arm.world.task}, lag {arm.world.lag}"
        rows.append([f"`{arm.method}`", where, str(tuning.best), inside, tried])
    return markdown(["method", "world", "taken", "inside", "learning rate / beta: area, mean of 3 seeds"], rows)


def _grid(task: str, lags: Sequence[int], entry: Callable[[Mapping[int, Arm], int], str]) -> str:
    arms = {method: {lag: arm for lag in LAGS for arm in at_lag(task, lag) if arm.method == method}
            for method in COMPARED[task]}  # fmt: skip
    rows = [[f"`{method}`", *(entry(arms[method], lag) for lag in lags)] for method in arms]
    return markdown(["method", *(f"lag {lag}" for lag in lags)], [row for row in rows if set(row[1:]) != {"-"}])


def _column(lines: Sequence[Line], name: str, how: str) -> str:
    values = [value for line in lines if (value := line.mean_of(name)) is not None]
    return format(mean(values), how) if values else "-"


def _shown(values: Sequence[float | None], how: str = ".3f") -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    found = estimate(numbers)
    text = format(found.mean, how) + (f" ± {format(found.half_width, how)}" if found.num > 1 else "")
    return text if found.num == len(SEEDS) else f"{text} (n {found.num})"


def _range(found: Interval, how: str) -> str:
    text = f"{format(found.value, how)} ({format(found.low, how)} to {format(found.high, how)})"
    return text if found.num == len(SEEDS) else f"{text} (n {found.num})"
