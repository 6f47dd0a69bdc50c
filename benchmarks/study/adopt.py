"""Take over the lines of older code, after cells of it were run again with the same result to every stored digit.

A change of the learner makes every line old, even where it changes no result: a repaired metric, a new task. Running a
few cells again costs minutes, and running all of them hours. The cells are chosen so that every method at every lag,
every seed and every part of a world of the old lines is among them, and their starting models are made again too.

Other processors round differently, and a starting model is then another one. So the stored lines are compared only
where they were made; elsewhere a checkout of the older code runs the same cells, and the two codes are compared on one
machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.study.cells import Cell, Line, World
from benchmarks.study.data import append_adoption, read_lines, same_results, sources_digest
from benchmarks.study.run import run_cell

_RUN = """
import json, sys
from pathlib import Path
import torch
from benchmarks.study.data import read_lines, sources_digest
from benchmarks.study.run import run_cell
torch.set_num_threads(1)
if sys.argv[1:]:
    print(json.dumps(run_cell(read_lines(Path(sys.argv[1]))[sys.argv[2]].cell, Path(sys.argv[3]))))
else:
    print(sources_digest())
"""
"""Run by Python in a checkout: print its digest, or the result of a cell of a data file; its starting models are in a
folder of their own."""


def adopt(path: Path, old: str, *, checkout: Path | None = None) -> None:
    """Run cells of the code `old` again and, if they come out the same, count its lines as results of this code.

    The lines that `old` itself took over are checked and count as well.

    Args:
        checkout: of the code `old`, which runs the cells for comparison; None: the stored lines are compared.

    Raises:
        SystemExit: there is no such line, its lines count already, the checkout is of other code, or a cell came out
            differently.
    """
    new = sources_digest()
    if old in same_results(path, new):
        raise SystemExit(f"the lines of {old} count as results of this code already")
    lines, own = read_lines(path, old), read_lines(path, new)
    if not lines:
        raise SystemExit(f"{path} has no line of {old}")
    if checkout is None:
        for key in lines.keys() & own.keys():
            _compare(lines[key], own[key].result)
    elif (found := _in_checkout(checkout)) != old:
        raise SystemExit(f"{checkout} is a checkout of {found}, not of {old}")
    chosen = covering(lines.values())
    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as other_models:
        for number, line in enumerate(chosen, start=1):
            expected = (
                line
                if checkout is None
                else Line(cell=line.cell, result=json.loads(_in_checkout(checkout, path, line, other_models)))
            )
            _compare(expected, run_cell(line.cell, Path(models)))
            print(f"{number} of {len(chosen)} {line.cell.key}: equal", file=sys.stderr, flush=True)
    sources_digest.cache_clear()
    if sources_digest() != new:
        raise SystemExit("the code has changed meanwhile: what came out is of neither")
    append_adoption(path, old=old, new=new, keys=[line.cell.key for line in chosen])


def _in_checkout(checkout: Path, path: Path | None = None, line: Line | None = None, models: str = "") -> str:
    """Return the digest of a checkout, or what its code makes of a cell (JSON); `models` is for starting models."""
    folders = [checkout, *(checkout / "services" / name for name in ("buffer", "trainer"))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder.resolve()) for folder in folders)}
    words = [] if path is None or line is None else [str(path.resolve()), line.cell.key, models]
    command = [sys.executable, "-c", _RUN, *words]
    # with -c the working folder comes first on the path
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout} cannot run {words[1] if words else 'this'}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


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
