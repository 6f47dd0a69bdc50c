"""The tables of the report: medians over seeds, ratios paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studies.learning_curve import reached
from studies.markdown import markdown
from studies.overlap_bench.runs import Cell, cells
from studies.pace import MAX_LATE_SHARE

Result = Mapping[str, Any]
RATIO_HEADS = ("lock-step, same searchers / this", "lock-step, one searcher / this")
NOTES = f"""\
Medians over seeds; ratios also with their range. A target that was never reached counts as infinitely late, also in \
ratios (two that never did have none). A cell with more than {100 * MAX_LATE_SHARE:g} % late engines or trainer \
(the most of all seeds is shown) says nothing about the rehearsed GPUs and is left out of ratios; so is one of \
which it is unknown."""


def reached_s(result: Result, target: float) -> float | None:
    """Return the seconds to a target of expected pass@1; None: never reached."""
    return reached([(seconds, accuracy) for seconds, _, accuracy, _ in result["curve"]], target)


def ratio_of(base: float | None, mine: float | None) -> float | None:
    """Return base by mine, where None is infinity: a target that was never reached. Two of those have no ratio."""
    if mine is None:
        return None if base is None else 0.0
    if base is None:
        return float("inf")
    return base / mine if mine else None


def late_share(result: Result) -> float | None:
    """Return how late the engines or the trainer were, the later of the two; None: unknown."""
    shares = [result["pace_late_share"], result["trainer_late_share"]]
    return None if None in shares else max(shares)


def is_usable(result: Result) -> bool:
    """Return whether a cell says something about the rehearsed GPUs."""
    share = late_share(result)
    return share is not None and share <= MAX_LATE_SHARE


def table(lines: Mapping[str, tuple[Cell, Result]], target: float) -> str:
    """Return the table, cells in the order of the plan."""
    found_names: dict[str, dict[int, tuple[Cell, Result]]] = {}
    for cell, result in lines.values():
        found_names.setdefault(cell.name, {})[cell.seed] = (cell, result)
    by_name = {cell.name: found_names[cell.name] for cell in cells([0]) if cell.name in found_names}
    times = {
        name: {seed: reached_s(result, target) for seed, (_, result) in found.items() if is_usable(result)}
        for name, found in found_names.items()
    }
    heads = ["rehearsal", "seeds", f"s to {target:g}", "s per step", *RATIO_HEADS]
    heads += [
        "trainer idle",
        "policy age",
        "generated",
        "trained",
        "late: engines",
        "late: trainer",
        "pass@1 at the end",
    ]
    rows = []
    for name, found in by_name.items():
        results = [result for _, result in found.values()]
        cell = next(iter(found.values()))[0]
        all_times = [reached_s(result, target) for result in results]
        num_left_out = sum(not is_usable(result) for result in results)
        rows.append(
            [
                name
                + (f" (too late or unknown: {num_left_out} of {len(results)}, not in ratios)" if num_left_out else ""),
                str(len(results)),
                _shown(_median_or_none(all_times), ".1f"),
                f"{statistics.median(r['train_s'] / r['num_steps'] for r in results):.3f}",
                *(_shown_ratios(_paired(times.get(base), times[name])) for base in _bases(cell)),
                f"{100 * _median(results, 'trainer_idle_share'):.0f} %",
                f"{_median(results, 'mean_policy_age'):.1f}",
                f"{_median(results, 'rollouts_generated'):.0f}",
                f"{_median(results, 'rollouts_trained'):.0f}",
                _most(results, "pace_late_share"),
                _most(results, "trainer_late_share"),
                f"{statistics.median(r['curve'][-1][2] for r in results):.3f}",
            ]
        )
    return markdown(heads, rows)


def _bases(cell: Cell) -> list[str]:
    """Return the names of the cells that `RATIO_HEADS` compares a cell with."""
    return [Cell(seed=0, searchers=searchers, lock_step=True).name for searchers in (cell.searchers, 1)]


def _paired(base: Mapping[int, float | None] | None, mine: Mapping[int, float | None]) -> list[float]:
    """Return the ratios over the seeds that both have; who never reached the target took infinitely long."""
    ratios = [ratio_of(base[seed], new) for seed, new in mine.items() if seed in base] if base else []
    return [ratio for ratio in ratios if ratio is not None]


def _shown_ratios(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}" if ratios else "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _median(results: Sequence[Result], name: str) -> float:
    return statistics.median(result[name] for result in results)


def _most(results: Sequence[Result], name: str) -> str:
    values = [result[name] for result in results]
    return "unknown" if None in values else f"{100 * max(values):.1f} %"


def _median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median, a target that was never reached counted as infinitely late."""
    middle = statistics.median(float("inf") if value is None else value for value in values)
    return None if middle == float("inf") else middle


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
