"""The aim, checked against the data: how a method at lag 16 compares with itself at lag 1 and with the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.study.cells import Line
from benchmarks.study.methods import METHODS
from benchmarks.study.stats import Estimate, estimate, ratio_interval
from benchmarks.study.tables import markdown, select

KEPT_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One method at lag 16."""

    method: str
    final: Estimate
    kept: tuple[float, float, float] | None
    """Final accuracy at lag 16 over that at lag 1, same seeds: ratio and 95 % bootstrap interval."""
    num_collapsed: int
    by_seed: Mapping[int, float]


def standings(lines: Mapping[str, Line]) -> list[Standing]:
    """Every method that has cells at lag 16, best first."""
    found = []
    for method in METHODS:
        late, early = (select(lines, "lag", method, lag) for lag in (16, 1))
        if not late:
            continue
        both = sorted(late.keys() & early.keys())
        found.append(
            Standing(
                method=method,
                final=estimate([line.final for line in late.values()]),
                kept=ratio_interval([late[s].final for s in both], [early[s].final for s in both]) if both else None,
                num_collapsed=sum(line.collapsed for line in late.values()),
                by_seed={seed: line.final for seed, line in late.items()},
            )
        )
    return sorted(found, key=lambda standing: -standing.final.mean)


def standings_table(found: list[Standing]) -> str:
    """Rank, accuracy, what is kept of lag 1, collapses, and the paired difference to the best baseline."""
    rival = best_baseline(found)
    rows = []
    for standing in found:
        ahead = "-" if rival is None or standing is rival else str(difference(standing, rival))
        kept = "-" if standing.kept is None else "{:.0%} ({:.0%} to {:.0%})".format(*standing.kept)
        kind = "family" if METHODS[standing.method].is_family else "baseline"
        num = len(standing.by_seed)
        rows.append(
            [f"`{standing.method}`", kind, str(standing.final), kept, f"{standing.num_collapsed} of {num}", ahead]
        )
    to = "-" if rival is None else f"`{rival.method}`"
    head = ["method", "", "final accuracy at lag 16", "share of lag 1", "collapsed", f"minus best baseline, {to}"]
    return markdown(head, rows)


def best_baseline(found: list[Standing]) -> Standing | None:
    """The baseline with the highest mean at lag 16."""
    return next((standing for standing in found if not METHODS[standing.method].is_family), None)


def difference(standing: Standing, rival: Standing) -> Estimate:
    """Final accuracy less the rival's, seed by seed (same starting model, same prompts)."""
    both = sorted(standing.by_seed.keys() & rival.by_seed.keys())
    return estimate([standing.by_seed[s] - rival.by_seed[s] for s in both])


def sentences(found: list[Standing], method: str) -> list[str]:
    """The three parts of the aim for one method, each with its answer."""
    standing = next((s for s in found if s.method == method), None)
    rival = best_baseline(found)
    if standing is None or standing.kept is None or rival is None:
        return [f"`{method}`: not enough cells yet."]
    num = len(standing.by_seed)
    baselines = [s for s in found if not METHODS[s.method].is_family]
    gaps = {s.method: difference(standing, s) for s in baselines}
    missing = [f"`{name}`" for name, about in METHODS.items() if not about.is_family and name not in gaps]
    ahead = _answer(all(gap.mean > 0 for gap in gaps.values()))
    if missing:
        ahead = f"open, no cells of {', '.join(missing)} yet"
    sure = sum(gap.low > 0 for gap in gaps.values())
    shown = ", ".join(f"`{name}` {gap} (n {gap.num})" for name, gap in gaps.items())
    return [
        f"keeps {standing.kept[0]:.0%} of its lag-1 accuracy at lag 16 (aim: {KEPT_SHARE:.0%}): "
        + _answer(standing.kept[0] >= KEPT_SHARE),
        f"collapsed in {standing.num_collapsed} of {num} runs at lag 16 (aim: none): "
        + _answer(standing.num_collapsed == 0),
        f"ahead of every baseline at lag 16, same seeds: {shown}; the interval is above 0 for {sure} of {len(gaps)} "
        "(aim: every mean above 0): " + ahead,
    ]


def _answer(reached: bool) -> str:
    return "reached" if reached else "not reached"
