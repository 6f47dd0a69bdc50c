"""What asynchrony is for: time to a target against searchers and lock-step, at the pace of GPUs.

    python studies/overlap.py run    [--seeds 3] [--cells TEXT] [--max-minutes N]
    python studies/overlap.py report [--target 0.75]

A rehearsal (studies/pace.py): engines, model, learning and services are real,
and the clock is that of one GPU per searcher and one for the trainer. The first run measures an optimizer step and
sets the pace of the data file: one searcher generates a batch in `--ratio` steps, and a step takes `--slowdown`
measured ones, so that nine processes fit on the cores; where they did not, the cell says so. Lock-step is
`sampling.alternate` at the same pace. The time to a target comes from the accuracy of every version, measured after the
run (studies/learning_curve.py), and begins when all searchers are ready. Every finished cell is one JSON line with
the digest of the code and the recipe that made it, and a cell that has a line is not run again: stop it at any time,
and start it again to go on. Lines of other code do not count, and the report has those of one source only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer"))]

from studies.data_file import PRODUCT, append_line, read_lines, source_digest  # noqa: E402
from studies.overlap_bench.cells import Cell, cells  # noqa: E402
from studies.overlap_bench.runs import WARM_STEPS, Pace, measure_pace, run_cell  # noqa: E402
from studies.overlap_bench.tables import NOTES, reached_s, table  # noqa: E402
from tba.config import load_recipe  # noqa: E402

DATA = ROOT / "docs" / "overlap" / "cells.jsonl"
OWN_SOURCES = (
    "studies/accuracy.py",
    "studies/learning_curve.py",
    "studies/overlap_bench/cells.py",
    "studies/overlap_bench/runs.py",
    "studies/whole_runs.py",
)
Lines = dict[str, tuple[Cell, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Data:
    """What a data file holds of one source: lines of other code are counted and left out."""

    source: str
    settings: dict[str, Any] | None
    """None: there is nothing of this source."""
    lines: Lines
    num_other: int


def source(recipe: Path, overrides: Mapping[str, str]) -> str:
    """Return the digest of the code and the recipe that decide what a cell gives."""
    sets = [f"{key}={value}" for key, value in overrides.items()]
    return source_digest([*PRODUCT, *OWN_SOURCES], load_recipe(recipe, sets=sets).model_dump_json())


def read(path: Path, source: str | None = None) -> Data:
    """Return the cells of one source by key; without `source` those of the newest line."""
    documents = list(read_lines(path))
    if source is None:
        source = str(documents[-1]["source"]) if documents else "none"
    data = Data(source, None, {}, sum("key" in each and each["source"] != source for each in documents))
    for document in documents:
        if document["source"] != source:
            continue
        if "settings" in document:
            data = replace(data, settings=document["settings"])
        else:
            data.lines[document["key"]] = (Cell(**document["cell"]), document["result"])
    return data


def run(args: argparse.Namespace) -> None:
    """Run what is left, one after the other."""
    overrides = dict(text.split("=", 1) for text in args.set)
    data = read(args.json, source(args.recipe, overrides))
    if data.num_other:
        print(f"{data.num_other} cells of {args.json} are of other code or another recipe: they are run again")
    asked = {"recipe": args.recipe.name, "num_steps": args.steps, "overrides": overrides}
    asked |= {"ratio": args.ratio, "slowdown": args.slowdown, "num_slots": args.slots}
    if data.settings is None:
        pace = measure_pace(
            args.recipe,
            ratio=args.ratio,
            slowdown=args.slowdown,
            num_slots=args.slots,
            num_steps=args.measured_steps,
            overrides=overrides,
        )
        append_line(args.json, {"settings": {**asked, "pace": pace.document()}, "source": data.source})
    else:
        if asked != {name: data.settings[name] for name in asked}:
            raise SystemExit(f"{args.json} was begun with {data.settings}; give the same, or another --json")
        pace = Pace(**data.settings["pace"])
    print(f"rehearsal: {pace.tokens_per_s:.0f} tokens/s a searcher, {pace.step_s:.3f} s a step", flush=True)
    began_s = time.monotonic()
    for cell in cells(range(args.seeds)):
        if cell.key in data.lines or args.cells not in cell.key:
            continue
        if args.max_minutes is not None and time.monotonic() - began_s > 60 * args.max_minutes:
            return
        result = run_cell(cell, args.recipe, pace, num_steps=args.steps, overrides=overrides)
        if source(args.recipe, overrides) != data.source:
            raise SystemExit(f"the code or {args.recipe} has changed during {cell.key}: its result is of neither")
        line = {"key": cell.key, "cell": cell.document(), "result": result, "source": data.source}
        append_line(args.json, line)
        seconds = reached_s(result, args.target)
        shown = {name: value for name, value in result.items() if name != "curve"}
        print(f"{cell.key}: {args.target:g} after {seconds and round(seconds, 1)} s; {shown}", flush=True)


def report(args: argparse.Namespace) -> None:
    """Print the tables of one source."""
    data = read(args.json, args.source)
    if data.settings is None:
        raise SystemExit(f"{args.json} holds nothing of source {data.source}; `run` fills it")
    settings, pace = data.settings, Pace(**data.settings["pace"])
    print(
        f"Rehearsal of {settings['recipe']}, {settings['num_steps']} steps: {pace.tokens_per_s:.0f} tokens/s a "
        f"searcher ({pace.num_slots} slots), {pace.step_s:.3f} s a step; one makes a batch in {pace.ratio:g} steps. "
        f"Source {data.source}; {data.num_other} cells of other sources are left out."
    )
    print(f"\n{table(data.lines, args.target)}\n\n{NOTES}")


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--json", type=Path, default=DATA, help="the data file")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", default="", help="only cells whose key contains this")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--target", type=float, default=0.75, help="expected pass@1")
    parser.add_argument("--ratio", type=float, default=4.0, help="time of a batch with one searcher, in steps")
    parser.add_argument("--slowdown", type=float, default=8.0, help="measured steps in a rehearsed one")
    parser.add_argument("--slots", type=int, default=32, help="slots of a searcher")
    parser.add_argument("--measured-steps", type=int, default=48, help="of the run that sets the pace; 8 do not count")
    parser.add_argument("--source", help="of report: this digest; default: that of the newest line")
    parser.add_argument("--max-minutes", type=float, default=None, help="begin no cell after this many minutes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe of all cells"
    )
    args = parser.parse_args()
    # as Ctrl-C does: the run that it started ends with it, and keeps no core from the next measurement
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.measured_steps <= WARM_STEPS:
        parser.error(f"--measured-steps {args.measured_steps} leaves none: the first {WARM_STEPS} do not count")
    (run if args.command == "run" else report)(args)


if __name__ == "__main__":
    main()
