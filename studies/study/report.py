"""Writes docs/asynchrony/tables.md from the data file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from studies.study.cells import Line
from studies.study.data import digests, read_cells, same_results, sources_digest
from studies.study.plan import BASE_LAG, LAGS, Study, at_lag
from studies.study.tables import by_lag, kept_table, standings_table, tuning_table
from studies.study.world import TASKS


def write_report(data: Path, folder: Path) -> None:
    """Tables of what has been run: of this code, or else of the newest code that made a line."""
    counts = digests(data)
    lines, digest = newest_study(data)
    same = same_results(data, digest)
    num_other = sum(number for other, number in counts.items() if other not in same)
    taken_over = {other: number for other, number in counts.items() if other in same - {digest}}
    study = Study(lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text(report_text(study, digest, num_other=num_other, taken_over=taken_over))


def newest_study(data: Path) -> tuple[dict[str, Line], str]:
    """Return the lines of this code, or else of the newest code that made a line, and its digest."""
    counts = digests(data)
    is_known = bool(counts.keys() & same_results(data, sources_digest()))
    digest = sources_digest() if is_known or not counts else [*counts][-1]
    return read_cells(data, digest), digest


def report_text(
    study: Study, digest: str, *, num_other: int = 0, taken_over: Mapping[str, int] = MappingProxyType({})
) -> str:
    """The tables as one Markdown document.

    Args:
        num_other: lines of code that does not count.
        taken_over: lines of older code that do, by its digest.
    """
    return "\n\n".join([*_head(study, digest, num_other, taken_over), *_lag_parts(study)]) + "\n"


def _head(study: Study, digest: str, num_other: int, taken_over: Mapping[str, int]) -> list[str]:
    code = f"the code with the digest `{digest}`"
    for older, number in taken_over.items():
        code += f", {number} of them taken over from `{older}` (cells.adopted.jsonl)"
    if digest != sources_digest():
        code += f" (not the code beside this file, which is `{sources_digest()}`)"
    cpu_h = sum(line.result["cpu_s"] for line in study.lines.values()) / 3600
    left = sum(1 for _ in study.plan())
    return [
        "# The studies: tables",
        "Made by `python studies/asynchrony.py report` from [cells.jsonl](cells.jsonl); do not edit. "
        f"{len(study.lines)} cells of {code} are done, {cpu_h:.2f} CPU hours; {left} of those known now are left; "
        f"{num_other} lines of other code are not used. What the words mean: "
        "[results.md](../results.md#asynchrony-study). Means ± 95 % t interval over 5 seeds (n says where there are "
        "fewer); differences and ratios: paired bootstrap over seeds.",
    ]


def _lag_parts(study: Study) -> list[str]:
    parts = []
    for task in TASKS:
        parts += [f"## {task}: which objective at which lag"]
        for lag in (0, BASE_LAG, 64):
            parts += [f"Lag {lag}, best first:", standings_table(study, task, lag)]
        parts += [
            "Area under the sampled curve:",
            by_lag(study, task, lambda line: line.area),
            "Area over the method's own at lag 0:",
            kept_table(study, task),
            "Final sampled accuracy:",
            by_lag(study, task, lambda line: line.final),
            "Area under the greedy curve:",
            by_lag(study, task, lambda line: line.area_greedy),
            "Share of steps whose gradient was clipped:",
            by_lag(study, task, lambda line: line.clip_share, ".0%"),
        ]
    arms = [arm for task in TASKS for lag in LAGS for arm in at_lag(task, lag)]
    return [*parts, "## Tuning", tuning_table(study, arms)]
