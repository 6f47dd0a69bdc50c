"""Take over the lines of older code, after cells of it were run again with the same result, bit by bit.

A change of the learner makes every line old, also where it changes no result: a repaired metric, a new task. Running a
few cells again costs minutes, and running all of them hours. The cells are chosen so that every method, task, lag and
kind of world of the old lines is among them. Bits are equal on one kind of processor only, so do it where the lines
were made; elsewhere it refuses, and nothing is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Cell, Line, World
from benchmarks.study.data import append_adoption, read_lines, same_results, sources_digest
from benchmarks.study.run import run_cell


def adopt(path: Path, old: str, *, models: Path) -> None:
    """Run cells of the code `old` again and, if they come out the same, count its lines as results of this code.

    Raises:
        SystemExit: there is no such line, or a cell came out differently.
    """
    new = sources_digest()
    if old in same_results(path, new):
        raise SystemExit(f"the lines of {old} count as results of this code already")
    lines = read_lines(path, old, adopted=False)
    if not lines:
        raise SystemExit(f"{path} has no line of {old}")
    chosen = covering(lines.values())
    for number, line in enumerate(chosen, start=1):
        found = run_cell(line.cell, models)
        differs = [name for name in line.result if _comparable(line.result, name) != _comparable(found, name)]
        print(
            f"{number} of {len(chosen)} {line.cell.key}: {', '.join(differs) or 'equal'}", file=sys.stderr, flush=True
        )
        if differs:
            raise SystemExit(
                f"{line.cell.key} came out differently ({', '.join(differs)}): either this code decides otherwise, or "
                "this machine computes otherwise. The lines stay lines of other code"
            )
    append_adoption(path, old=old, new=new, keys=[line.cell.key for line in chosen])


def covering(lines: Iterable[Line]) -> list[Line]:
    """Return few lines with every method, task, lag and part of a world that any has, the cheapest first."""
    left = sorted(lines, key=lambda line: (line.result["cpu_s"], line.cell.key))
    missing = {part for line in left for part in _parts(line.cell)}
    chosen: list[Line] = []
    while missing:
        best = max(left, key=lambda line: len(missing & _parts(line.cell)))  # of equal ones the cheapest
        missing -= _parts(best.cell)
        chosen.append(best)
    return chosen


def _parts(cell: Cell) -> set[tuple[str, Any]]:
    world = {(part.name, getattr(cell.world, part.name)) for part in fields(World)}
    return {("method", cell.method), ("is_noise", not cell.setting.learning_rate), *world}


def _comparable(result: Any, name: str) -> Any:
    return None if name == "cpu_s" else result.get(name)
