"""Tables of the studies in Markdown. A table holds what is there: a missing cell is a dash, n says how many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from studies.study.cells import Line, mean
from studies.study.plan import GROUP_SIZES, LAGS, SEEDS, Arm, Study, noise_cells
from studies.study.stats import Interval, difference_interval, estimate, ratio_interval
from studies.study.training import BATCH_ROLLOUTS, num_steps_of

Found = Mapping[int, Line]
NO_CELLS = "No cell of this table has been run yet."
TARGETS = (0.8, 0.85, 0.9)
"""Sampled accuracies of the tables of costs."""
PACES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""What it costs to generate a rollout, where to train on one costs 1."""


def screening_table(study: Study) -> str:
    """Every method that is screened, best first."""
    full, rows = study.compared("addition"), []
    for rank, (method, tuning) in enumerate(study.screened().items(), start=1):
        score = f"{max(tuning.scores.values()):.3f}"
        rows.append([str(rank), f"`{method}`", score, str(tuning.best), "yes" if method in full else ""])
    return markdown(["", "method", "area, mean of 2 seeds", "learning rate / beta", "full comparison"], rows)


def by_lag(study: Study, task: str, value: Callable[[Line], float | None], how: str = ".3f") -> str:
    """One row per method, one column per lag."""
    arms = {(arm.method, lag): arm for lag in LAGS for arm in study.at_lag(task, lag)}
    return _grid(
        "method",
        [(f"`{method}`", method) for method in study.compared(task)],
        [(f"lag {lag}", lag) for lag in LAGS],
        lambda method, lag: _shown([value(line) for line in study.found(arms[method, lag]).values()], how),
    )


def kept_table(study: Study, task: str, *, is_moved: bool = False) -> str:
    """Area at every lag over the method's own at lag 0, the same seeds.

    Args:
        is_moved: compare the curve from step `lag` on with that of lag 0 from its start on, over equally many steps.
    """
    arms = {(arm.method, lag): arm for lag in LAGS for arm in study.at_lag(task, lag)}

    def entry(method: str, lag: int) -> str:
        late, early = study.found(arms[method, lag]), study.found(arms[method, 0])
        if not (both := sorted(late.keys() & early.keys())):
            return "-"
        if is_moved:
            end = num_steps_of(arms[method, lag].world)
            mine = [area_between(late[s], lag, end) for s in both]
            return _range(ratio_interval(mine, [area_between(early[s], 0, end - lag) for s in both]), ".0%")
        return _range(ratio_interval([late[s].area for s in both], [early[s].area for s in both]), ".0%")

    return _grid(
        "method",
        [(f"`{method}`", method) for method in study.compared(task)],
        [(f"lag {lag}", lag) for lag in LAGS if lag],
        entry,
    )


def standings_table(study: Study, task: str, lag: int) -> str:
    """The methods at one lag, best first, with their distance to the best on the same seeds."""
    found = {arm.method: lines for arm in study.at_lag(task, lag) if (lines := study.found(arm))}
    ranked = sorted(found, key=lambda method: -mean([line.area for line in found[method].values()]))
    return arms_table({f"`{method}`": found[method] for method in ranked}, against=f"`{ranked[0]}`" if ranked else "")


def arms_table(found: Mapping[str, Found], *, against: str = "", labels: Mapping[str, str] | None = None) -> str:
    """One row per arm.

    Args:
        found: finished cells by label.
        against: label of the arm that the others are compared with, seed by seed.
        labels: the same for each label, where it differs.
    """
    rows = []
    for label, lines in found.items():
        if not lines:
            continue
        every = list(lines.values())
        rival_label = (labels or {}).get(label, against)
        rival = found.get(rival_label, {})
        both = sorted(lines.keys() & rival.keys())
        gap = "-"
        if both and label != rival_label:
            gap = _range(difference_interval([lines[s].area for s in both], [rival[s].area for s in both]), "+.3f")
        rows.append(
            [
                label,
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
    to = f"minus {against}" if against else "minus its reference"
    head = ["", "area", to, "final", "final greedy", "steps clipped", "ESS", "age", "collapsed"]
    return markdown(head, rows)


def tuning_table(study: Study, arms: Iterable[Arm]) -> str:
    """What was tried and taken, and whether the best is inside the grid."""
    rows, seen = [], set()
    for arm in arms:
        tuning = study.tuning(arm.method, arm.tuned_in)
        if (arm.method, arm.tuned_in) in seen or tuning is None or not tuning.is_done:
            continue
        seen.add((arm.method, arm.tuned_in))
        world = arm.tuned_in
        where = f"{world.task}, lag {world.lag}"
        where += "" if world.replay_m is None else f", buffer, {world.samples_per_insert} per insert"
        where += "" if world.clip == "relative" else ", no clip"
        ordered = sorted(tuning.scores.items(), key=lambda item: (item[0].beta, item[0].learning_rate))
        tried = "; ".join(f"{setting}: {score:.3f}" for setting, score in ordered)
        rows.append([f"`{arm.method}`", where, str(tuning.best), "yes" if tuning.is_inside else "**given up**", tried])
    return markdown(["method", "world", "taken", "inside", "learning rate / beta: area, mean of 3 seeds"], rows)


def generated_table(found: Mapping[str, tuple[Arm, Found]], budgets: Sequence[int]) -> str:
    """Sampled accuracy by rollouts generated (equal generation), and at the end (equal training)."""
    rows = []
    for label, (arm, lines) in found.items():
        if not lines:
            continue
        row = [label]
        for budget in budgets:
            step = step_of(arm, budget)
            row.append(_shown([_at(line, step) for line in lines.values()]))
        rows.append([*row, _shown([line.final for line in lines.values()])])
    return markdown(["", *(f"{budget:,} generated" for budget in budgets), "at the end, equally trained"], rows)


def pace_table(found: Mapping[str, tuple[Arm, Found]], target: float) -> str:
    """Time to a target by pace, in units of training on one batch, where both sides always work."""
    rows = []
    for label, (arm, lines) in found.items():
        if not lines:
            continue
        steps = [step for line in lines.values() if (step := line.first_step_at(target)) is not None]
        row = [label, f"{len(steps)} of {len(lines)}"]
        if len(steps) == len(lines):
            row += [f"{mean([num_generated(arm, step) for step in steps]):,.0f}"]
            row += [f"{mean(steps) * BATCH_ROLLOUTS:,.0f}"]
            for pace in PACES:
                times = [max(num_generated(arm, step) / BATCH_ROLLOUTS * pace, step) for step in steps]
                row.append(f"{mean(times):.0f}")
        else:
            row += ["-"] * (2 + len(PACES))
        rows.append(row)
    return markdown(["", "reached", "generated", "trained", *(f"pace {pace:g}" for pace in PACES)], rows)


def noise_table(study: Study) -> str:
    """The gradient's noise by K, and what follows from K = 8 alone by the formulas of gradients.py."""
    found: dict[int, tuple[float, float]] = {}
    for size in GROUP_SIZES:
        cells = [cell for cell in noise_cells() if cell.world.group_size == size and cell.key in study.lines]
        results = [study.lines[cell.key].result for cell in cells]
        if results and (signal := mean([result["signal"] for result in results])) > 0:
            within, between = (mean([result[name] for result in results]) / signal for name in ("within", "between"))
            found[size] = within, between
    rows = []
    for size, (within, between) in found.items():
        row = [str(size), str(BATCH_ROLLOUTS // size), f"{within:.2f}", f"{between:.2f}", f"{within + between:.2f}"]
        if 8 in found:
            of_within, of_between = found[8][0] * (7 / 8) * size / (size - 1), found[8][1] * size / 8
            row += [f"{of_within:.2f}", f"{of_between:.2f}", f"{of_within + of_between:.2f}"]
        else:
            row += ["-"] * 3
        rows.append(row)
    head = ["K", "prompts", "within", "between", "both", "within, by K = 8", "between, by K = 8", "both, by K = 8"]
    return markdown(head, rows)


def num_generated(arm: Arm, step: int) -> float:
    """Rollouts generated for the first `step` steps of an arm."""
    if arm.world.replay_m is None:
        return float(step * BATCH_ROLLOUTS)
    return BATCH_ROLLOUTS * (1 + max(0, step - 1) / arm.world.samples_per_insert) if step else 0.0


def step_of(arm: Arm, budget: int) -> float:
    """The step of an arm at which it has generated so many rollouts."""
    batches = budget / BATCH_ROLLOUTS
    return batches if arm.world.replay_m is None else 1 + (batches - 1) * arm.world.samples_per_insert


def area_between(line: Line, first: int, last: int) -> float:
    """Mean of sampled accuracy over the steps from `first` to `last`, by the trapezoid rule; as `Line.area` counts."""
    at, sampled = line.points("sampled")
    steps = np.unique([first, *(step for step in at if first < step < last), last])
    return float(np.trapezoid(np.interp(steps, at, sampled), steps)) / (last - first)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or a sentence when there are no rows."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return NO_CELLS
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body])


def _grid(
    corner: str,
    rows: Sequence[tuple[str, str]],
    columns: Sequence[tuple[str, int]],
    entry: Callable[[str, int], str],
) -> str:
    body = [[label, *(entry(row, column) for _, column in columns)] for label, row in rows]
    return markdown([corner, *(label for label, _ in columns)], [row for row in body if set(row[1:]) != {"-"}])


def _at(line: Line, step: float) -> float | None:
    steps, sampled = line.result["curve"]["step"], line.result["curve"]["sampled"]
    return None if step > num_steps_of(line.cell.world) else float(np.interp(step, steps, sampled))


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
