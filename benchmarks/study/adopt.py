"""Take over the lines of older code, after cells of it were run again with the same result to every stored digit.

A change of the learner makes every line old, even where it changes no result: a repaired metric, a new task. Running a
few cells again costs minutes, and running all of them hours. The cells are chosen so that every method at every lag,
every seed and every part of a world of the old lines is among them, and their starting models are made again too. Other
processors may round differently: do it where the lines were made.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Cell, Line, World
from benchmarks.study.data import append_adoption, read_lines, same_results, sources_digest
from benchmarks.study.run import run_cell


def adopt(path: Path, old: str) -> None:
    """Run cells of the code `old` again and, if they come out the same, count its lines as results of this code.

    The lines that `old` itself took over are checked and count as well.

    Raises:
        SystemExit: there is no such line, its lines count already, or a cell came out differently.
    """
    new = sources_digest()
    if old in same_results(path, new):
        raise SystemExit(f"the lines of {old} count as results of this code already")
    lines, own = read_lines(path, old), read_lines(path, new)
    if not lines:
        raise SystemExit(f"{path} has no line of {old}")
    for key in lines.keys() & own.keys():
        _compare(lines[key], own[key].result)
    chosen = covering(lines.values())
    with tempfile.TemporaryDirectory() as models:
        for number, line in enumerate(chosen, start=1):
            _compare(line, run_cell(line.cell, Path(models)))
            print(f"{number} of {len(chosen)} {line.cell.key}: equal", file=sys.stderr, flush=True)
    sources_digest.cache_clear()
    if sources_digest() != new:
        raise SystemExit("the code has changed meanwhile: what came out is of neither")
    append_adoption(path, old=old, new=new, keys=[line.cell.key for line in chosen])


def covering(lines: Iterable[Line]) -> list[Line]:
    """Return few lines that have every method at every lag, seed and part of a world of all, the cheapest first."""
    # a run that was given up says little: it ends early
    left = sorted(lines, key=lambda line: ("curve" in line.result and line.broke, line.result["cpu_s"], line.cell.key))
    missing = {part for line in left for part in _parts(line.cell)}
    chosen: list[Line] = []
    while missing:
        best = max(left, key=lambda line: len(missing & _parts(line.cell)))  # of equal ones the first
        missing -= _parts(best.cell)
        chosen.append(best)
    return chosen


def _parts(cell: Cell) -> set[tuple[Any, ...]]:
    world = {(part.name, getattr(cell.world, part.name)) for part in fields(World)}
    is_noise = not cell.setting.learning_rate
    return {("method", cell.method, cell.world.task, cell.world.lag, is_noise), ("seed", cell.seed), *world}


def _compare(line: Line, found: Mapping[str, Any]) -> None:
    names = (line.result.keys() | found.keys()) - {"cpu_s"}
    if differs := sorted(name for name in names if line.result.get(name) != found.get(name)):
        raise SystemExit(
            f"{line.cell.key} came out differently ({', '.join(differs)}): either this code decides otherwise, or this "
            "machine computes otherwise. The lines stay lines of other code"
        )
