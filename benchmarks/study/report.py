"""Writes docs/asynchrony/tables.md and the plots from the data file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.study.cells import REPLAY_LAG, REPLAY_M, Line, plan
from benchmarks.study.plots import write_plots
from benchmarks.study.tables import (
    by_lag,
    k_table,
    m_table,
    mean_ess,
    replay_table,
    scaling_table,
    second_table,
    tuning_table,
)
from benchmarks.study.verdict import sentences, standings, standings_table

CANDIDATES = ("tba_prime", "tba_prime_fixed", "tba_prime_unweighted", "tb")
"""Members of the family that could be the default."""


def write_report(lines: Mapping[str, Line], folder: Path) -> None:
    """Tables and plots of what has been run so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text(report_text(lines))
    write_plots(lines, folder)


def report_text(lines: Mapping[str, Line]) -> str:
    """The tables as one Markdown document."""
    found = standings(lines)
    left = sum(1 for _ in plan(lines))
    parts = [
        "# The asynchrony study: tables",
        "Made by `python benchmarks/asynchrony.py report` from [cells.jsonl](cells.jsonl); do not edit. "
        f"{len(lines)} cells are done, {left} of those known now are left. Method: "
        "[results.md](../results.md#asynchrony-study). Accuracy is sampled pass@1, exact, mean ± 95 % t interval over "
        "5 seeds (n says where there are fewer).",
        "## Lag 16",
        standings_table(found),
        *(f"`{name}`\n" + "\n".join(f"* {line}" for line in sentences(found, name)) for name in CANDIDATES),
        "![accuracy and ESS by lag](accuracy_by_lag.png)",
        "![learning curves](curves_lag16.png)",
        "## Final accuracy by lag",
        by_lag(lines, lambda line: line.final),
        "## Final greedy accuracy by lag",
        by_lag(lines, lambda line: line.final_greedy),
        "## Best accuracy within the run",
        by_lag(lines, lambda line: line.best),
        "## Collapses",
        by_lag(lines, lambda line: float(line.collapsed), collapse=True),
        "## Effective sample size, second half of the run",
        by_lag(lines, mean_ess),
        f"## Lag {REPLAY_LAG} with a replay buffer",
        replay_table(lines, REPLAY_LAG, REPLAY_M),
        "## Tuning",
        tuning_table(lines),
        "## Lag 16 with the setting that came second in tuning",
        second_table(lines),
        "## C5: m, at lag 4",
        m_table(lines),
        "## C6: gradient noise by group size",
        k_table(lines),
        "## C7: beta and the scale of the loss",
        scaling_table(lines),
    ]
    return "\n\n".join(parts) + "\n"
