"""Tables of the study in Markdown. A table holds what is there: a missing cell is a dash, n says how many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.study.cells import SCALING_BETAS, SCALINGS, Line, tuned, tuning
from benchmarks.study.methods import METHODS
from benchmarks.study.stats import estimate

Lines = Mapping[str, Line]
LAGS = (0, 1, 4, 16, 64)


def select(lines: Lines, kind: str, method: str, lag: int, m: float | None = None) -> dict[int, Line]:
    """Finished cells of the method's tuned setting by seed (of the second best setting, where the kind says so)."""
    setting = tuned(method, lines, rank=int(kind == "second"))
    return {
        line.cell.seed: line
        for line in lines.values()
        if (line.cell.kind, line.cell.method, line.cell.lag, line.cell.most_on_policy_prob) == (kind, method, lag, m)
        and (line.cell.learning_rate, line.cell.beta) == setting
    }


def mean_ess(line: Line) -> float | None:
    """Mean effective sample size (share of the batch) over the second half of a run."""
    values = line.result["curve"]["ess"]
    known = [value for value in values[len(values) // 2 :] if value is not None]
    return sum(known) / len(known) if known else None


def by_lag(lines: Lines, value: Callable[[Line], float | None], *, collapse: bool = False) -> str:
    """One row per method, one column per lag: mean with its interval over seeds, or the number of collapses."""
    rows = []
    for method in METHODS:
        row = [f"`{method}`"]
        for lag in LAGS:
            found = select(lines, "lag", method, lag).values()
            values = [v for line in found if (v := value(line)) is not None]
            if not values:
                row.append("-")
            elif collapse:
                row.append(f"{int(sum(values))} of {len(values)}")
            else:
                row.append(_with_n(values))
        if len(set(row[1:])) > 1:
            rows.append(row)
    return markdown(["method", *(f"lag {lag}" for lag in LAGS)], rows)


def tuning_table(lines: Lines) -> str:
    """Make the table of the tried settings, their results and the chosen one."""
    rows = []
    for method in METHODS:
        cells = tuning(method)
        setting = tuned(method, lines)
        if not any(cell.key in lines for cell in cells):
            continue
        tried = "; ".join(
            f"{cell.learning_rate:g}/{cell.beta:g}: {lines[cell.key].final:.2f}" for cell in cells if cell.key in lines
        )
        rows.append([f"`{method}`", tried, "-" if setting is None else f"{setting[0]:g} / {setting[1]:g}"])
    return markdown(["method", "learning rate/beta: final accuracy at lag 16", "taken"], rows)


def second_table(lines: Lines) -> str:
    """Lag 16 with the best setting and the second best, on the seeds that both have."""
    rows = []
    for method in METHODS:
        best, second = select(lines, "lag", method, 16), select(lines, "second", method, 16)
        if both := sorted(best.keys() & second.keys()):
            row = [f"`{method}`"]
            for rank, found in ((0, best), (1, second)):
                rate, beta = tuned(method, lines, rank=rank) or (0.0, 0.0)
                row += [f"{rate:g} / {beta:g}", _with_n([found[seed].final for seed in both])]
            rows.append(row)
    return markdown(["method", "best setting", "final accuracy", "second setting", "final accuracy"], rows)


def replay_table(lines: Lines, lag: int, m: float) -> str:
    """The same lag without replay and with it, on the seeds that both have: their starting models differ."""
    rows = []
    for method in METHODS:
        plain, replayed = select(lines, "lag", method, lag), select(lines, "replay", method, lag, m)
        if both := sorted(plain.keys() & replayed.keys()):
            found = [replayed[seed] for seed in both]
            rows.append(
                [
                    f"`{method}`",
                    ", ".join(map(str, both)),
                    _with_n([plain[seed].final for seed in both]),
                    _with_n([line.final for line in found]),
                    _with_n([replayed[seed].final - plain[seed].final for seed in both]),
                    f"{sum(line.collapsed for line in found)} of {len(found)}",
                    _shown(_mean_of(mean_ess(line) for line in found)),
                ]
            )
    return markdown(["method", "seeds", "no replay", f"replay, m = {m:g}", "difference", "collapsed", "ESS"], rows)


def m_table(lines: Lines) -> str:
    """C5: final accuracy by m at lag 4."""
    groups: dict[tuple[str, float], list[Line]] = {}
    for line in lines.values():
        if line.cell.kind == "m" and line.cell.most_on_policy_prob is not None:
            groups.setdefault((line.cell.method, line.cell.most_on_policy_prob), []).append(line)
    rows = [
        [f"`{method}`", f"{m:g}", _with_n([line.final for line in found]), _shown(_mean_of(map(_age, found)), ".0f")]
        for (method, m), found in sorted(groups.items())
    ]
    return markdown(["method", "m", "final accuracy", "mean policy age"], rows)


def k_table(lines: Lines) -> str:
    """C6: gradient noise by group size, 128 rollouts a batch."""
    groups: dict[int, list[float]] = {}
    for line in lines.values():
        if line.cell.kind == "k" and (noise := line.result["relative_variance"]) is not None:
            groups.setdefault(line.cell.group_size, []).append(noise)
    rows = [[str(k), f"{estimate(v).mean:.1f}", str(len(v))] for k, v in sorted(groups.items())]
    return markdown(["K", "variance / squared mean", "seeds"], rows)


def scaling_table(lines: Lines) -> str:
    """C7: `tb` at lag 1 by beta, A-form beside the raw scale."""
    rows = []
    for beta, then in SCALING_BETAS:
        row = [f"{beta:g}" if then is None else f"{beta:g}, half-way {then:g}"]
        for scaling in SCALINGS:
            found = [
                line.final
                for line in lines.values()
                if line.cell.kind == "scaling"
                and (line.cell.beta, line.cell.beta_then, line.cell.scaling) == (beta, then, scaling)
            ]
            row.append(_with_n(found) if found else "-")
        if row[1:] != ["-", "-"]:
            rows.append(row)
    return markdown(["beta", "A-form", "raw (2 / beta^2)"], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or a sentence when there are no rows."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return "No cell of this table has been run yet."
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body])


def _with_n(values: Sequence[float]) -> str:
    found = estimate(values)
    return f"{found}" if found.num == 5 else f"{found} (n {found.num})"


def _age(line: Line) -> float | None:
    return _mean_of(line.result["curve"]["age"])


def _mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _shown(value: float | None, how: str = ".2f") -> str:
    return "-" if value is None else format(value, how)
