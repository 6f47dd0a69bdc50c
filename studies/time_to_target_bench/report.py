"""Tables of the data file: tuning, seconds to the targets, and the ratios of paired seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from studies.accuracy import ratio_of
from studies.time_to_target_bench.cells import MORE_SEEDS, SEEDS, TUNING_SEEDS, Cell, Rate, Result, Side
from studies.time_to_target_bench.workloads import WORKLOADS

SIDES: tuple[Side, ...] = ("trl", "tba")


Results = Mapping[Cell, Result]


def one_source(results: Results, num_steps: int | None) -> tuple[dict[Cell, Result], list[str]]:
    """Return the results that may stand in one table, and what was left out.

    Of a side with its settings only those of its newest source (the last line) count, and only those of `num_steps`
    steps (None: the workload's), so that neither older code nor a short trial gets between the others.
    """
    found = {
        cell: result
        for cell, result in results.items()
        if cell.num_steps == (num_steps or WORKLOADS[cell.workload].num_steps)
    }
    newest = {_what(cell): cell.source for cell in found}
    kept = {cell: result for cell, result in found.items() if cell.source == newest[_what(cell)]}
    lines = [f"{' '.join([*what[:2], *what[2]])}, K = {what[3]}: source {s}" for what, s in newest.items()]
    if num_other := len(results) - len(kept):
        lines.append(f"{num_other} results of another source or another number of steps are left out")
    return kept, lines


def _what(cell: Cell) -> tuple[str, Side, tuple[str, ...], int]:
    return cell.workload, cell.side, cell.settings, cell.group_size


def best_rate(results: Results, workload: str, side: Side, settings: tuple[str, ...]) -> Rate:
    """Return the rate and schedule of the tuning runs that reached the first target in the fewest steps.

    In steps, since what a step takes follows the machine's speed more than the rate (which acts on it through the share
    of tied groups alone); by the geometric mean over their seeds, since a median of three leaves two runs out. One that
    never reached it took infinitely many; where the means are equal, the best last accuracy decides. Only rates with as
    many seeds as the best measured one are compared.

    Raises:
        SystemExit: nothing was tuned.
    """
    by_rate: dict[Rate, list[Result]] = {}
    for result in _tuning(results, workload, side, settings):
        by_rate.setdefault(result.cell.rate, []).append(result)
    if not by_rate:
        raise SystemExit(f"error: {side} has no tuning runs on {workload}, of this code and length; run `tune` first")
    target, num_seeds = WORKLOADS[workload].targets[0], max(map(len, by_rate.values()))

    def badness(rate: Rate) -> tuple[float, float]:
        found = by_rate[rate]
        steps = [result.to_target(target, "step") for result in found]
        return (
            statistics.geometric_mean(float("inf") if each is None else each for each in steps),
            -statistics.median(result.last for result in found),
        )

    return min((rate for rate, found in by_rate.items() if len(found) == num_seeds), key=badness)


def is_at_edge(results: Results, workload: str, side: Side, settings: tuple[str, ...]) -> bool:
    """Return whether the best rate is the least or the greatest of its schedule: a wider grid may have a better one."""
    best = best_rate(results, workload, side, settings)
    cells = [result.cell for result in _tuning(results, workload, side, settings)]
    rates = [cell.learning_rate for cell in cells if cell.schedule == best.schedule]
    return best.value in (min(rates), max(rates))


def _tuning(results: Results, workload: str, side: Side, settings: tuple[str, ...]) -> list[Result]:
    found = [
        result
        for cell, result in results.items()
        if _what(cell)[:3] == (workload, side, settings) and cell.seed in TUNING_SEEDS
    ]
    return sorted(found, key=lambda result: (result.cell.schedule, result.cell.learning_rate, result.cell.seed))


def report_text(results: Results, num_steps: int | None = None) -> str:
    """Return the tables of every workload and every setting of tba."""
    kept, notes = one_source(results, num_steps)
    return "\n".join([*notes, *_lines(kept)])


def _lines(results: Results) -> Iterator[str]:
    for name, group_size in dict.fromkeys((cell.workload, cell.group_size) for cell in results):
        found = {c: result for c, result in results.items() if (c.workload, c.group_size) == (name, group_size)}
        # in the order of the file; none stands for the recipe as it is shipped
        all_settings = list(dict.fromkeys(cell.settings for cell in found if cell.side == "tba"))
        target = WORKLOADS[name].targets[0]
        yield f"\n## {name}, K = {group_size}\n\nTuning: pass@1 at the end, and to {target}\n"
        yield from _row("side", "learning rate", "seed", "last", "steps", "seconds", "CPU s", "s per step", "mean age")
        yield from _row(*["---"] * 9)
        for side, settings in [("trl", ()), *(("tba", settings) for settings in all_settings)]:
            for result in _tuning(found, name, side, settings):
                yield from _tuning_row(result, target)
        for settings in all_settings:
            yield from _comparison(found, name, settings)


def _tuning_row(result: Result, target: float) -> Iterator[str]:
    cell, values = result.cell, [_figure(result.to_target(target, of)) for of in ("step", "seconds", "cpu_s")]
    age = result.versions.get("policy_age_mean", "0")
    side = " ".join([cell.side, *cell.settings])
    shown = [str(cell.rate), str(cell.seed), f"{result.last:.3f}"]
    yield from _row(side, *shown, *values, f"{result.seconds_per_step:.3f}", age)


def _comparison(results: Results, workload: str, settings: tuple[str, ...]) -> Iterator[str]:
    """Yield both sides at their best learning rates, and TRL by tba for every paired seed."""
    try:
        rates = {side: best_rate(results, workload, side, () if side == "trl" else settings) for side in SIDES}
    except SystemExit:
        return
    pairs: list[dict[Side, Result]] = []
    for seed in (*SEEDS, *MORE_SEEDS):
        pair: dict[Side, Result] = {
            side: result
            for cell, result in results.items()
            for side in SIDES
            if _what(cell)[:3] == (workload, side, () if side == "trl" else settings)
            and (cell.seed, cell.rate) == (seed, rates[side])
        }
        if len(pair) == len(SIDES):
            pairs.append(pair)
    if not pairs:
        return
    yield f"\nTRL at {rates['trl']} and tba at {rates['tba']} with {' '.join(settings) or 'the recipe as it is'}\n"
    for side in SIDES:
        if is_at_edge(results, workload, side, () if side == "trl" else settings):
            yield f"WARNING: {rates[side]} is at the edge of the rates tried for {side}; widen the grid\n"
    yield from _row("figure", *(f"{side}, seed {p[side].cell.seed}" for p in pairs for side in SIDES), "TRL by tba")
    yield from _row(*["---"] * (2 + len(pairs) * len(SIDES)))
    for target in WORKLOADS[workload].targets:
        for unit in ("seconds", "cpu_s", "step"):
            values = [[pair[side].to_target(target, unit) for side in SIDES] for pair in pairs]
            yield from _ratio_row(f"{unit} to {target}", values)
    for start in ("trainer_start", "first_batch"):
        target = WORKLOADS[workload].targets[0]
        values = [
            [
                p["trl"].to_target(target),
                None if (s := p["tba"].to_target(target)) is None else s + p["tba"].starts[start],
            ]
            for p in pairs
        ]
        yield from _ratio_row(f"seconds to {target}, tba's clock from {start}", values)
    for figure in ("seconds_per_step", "cpu_s_per_step", "response_tokens_mean", "last"):
        yield from _ratio_row(figure, [[getattr(pair[side], figure) for side in SIDES] for pair in pairs])


def _ratio_row(name: str, values: list[list[float | None]]) -> Iterator[str]:
    """Yield a row with TRL by tba; a side that never reached the target took infinitely long."""
    ratios = [found for trl, tba in values if (found := ratio_of(trl, tba)) is not None]
    summary = "-"
    if ratios:
        summary = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}, n {len(ratios)})"
    yield from _row(name, *(_figure(value) for pair in values for value in pair), summary)


def _row(*columns: str) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"


def _figure(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"
