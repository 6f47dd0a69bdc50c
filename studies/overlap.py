"""What asynchrony is for: time to a target against searchers and lock-step, at the pace of GPUs.

    python studies/overlap.py run    [--seeds 3] [--cells TEXT] [--max-minutes N]
    python studies/overlap.py report [--target 0.75]

A rehearsal of the quickstart (studies/pace.py): engines, model, learning and services are real, and the clock is that
of one GPU per searcher and one for the trainer. The first run measures an optimizer step and sets the pace of the data
file (studies/overlap_bench/runs.py); where the processes did not fit on the cores, the cell says so. Lock-step is
`sampling.alternate` at the same pace. The time to a target comes from the accuracy of every version, measured after the
run (studies/learning_curve.py), and begins when all searchers are ready. Every finished cell is one JSON line with
the digest of the code and the recipe that made it, and a cell that has a line is not run again: stop it at any time,
and start it again to go on. Lines of other code do not count, and the report has those of the newest source only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer"))]

from studies.data_file import PRODUCT, append_line, read_lines, source_digest  # noqa: E402
from studies.overlap_bench.runs import RECIPE, Cell, Pace, cells, measure_pace, run_cell  # noqa: E402
from studies.overlap_bench.tables import NOTES, reached_s, table  # noqa: E402
from tba.config import load_recipe  # noqa: E402

DATA = ROOT / "docs" / "overlap" / "cells.jsonl"
OWN_SOURCES = ("studies/learning_curve.py", "studies/overlap_bench/runs.py", "studies/whole_runs.py")


@dataclass(frozen=True, slots=True)
class Data:
    """What a data file holds of one source: lines of other code are counted and left out."""

    source: str
    settings: dict[str, Any] | None
    """None: there is nothing of this source."""
    lines: dict[str, tuple[Cell, dict[str, Any]]]
    num_other: int


def source() -> str:
    """Return the digest of the code and the recipe that decide what a cell gives."""
    return source_digest([*PRODUCT, *OWN_SOURCES], load_recipe(RECIPE).model_dump_json())


def read(path: Path, source: str | None = None) -> Data:
    """Return the cells of one source by key; without `source` those of the newest line."""
    documents = list(read_lines(path))
    if source is None:
        source = str(documents[-1]["source"]) if documents else "none"
    own = [each for each in documents if each["source"] == source]
    return Data(
        source,
        next((each["settings"] for each in own if "settings" in each), None),
        {each["key"]: (Cell(**each["cell"]), each["result"]) for each in own if "key" in each},
        sum("key" in each for each in documents if each["source"] != source),
    )


def run(args: argparse.Namespace) -> None:
    """Run what is left, one after the other."""
    data = read(args.json, source())
    if data.num_other:
        print(f"{data.num_other} cells of {args.json} are of other code or another recipe: they are run again")
    if data.settings is None:
        pace = measure_pace()
        settings = {"recipe": RECIPE.name, "num_steps": args.steps, "pace": asdict(pace)}
        append_line(args.json, {"settings": settings, "source": data.source})
    elif args.steps != data.settings["num_steps"]:
        raise SystemExit(f"{args.json} was begun with {data.settings}; give the same --steps, or another --json")
    else:
        pace = Pace(**data.settings["pace"])
    print(f"rehearsal: {pace.tokens_per_s:.0f} tokens/s a searcher, {pace.step_s:.3f} s a step", flush=True)
    began_s = time.monotonic()
    for cell in cells(range(args.seeds)):
        if cell.key in data.lines or args.cells not in cell.key:
            continue
        if args.max_minutes is not None and time.monotonic() - began_s > 60 * args.max_minutes:
            return
        result = run_cell(cell, pace, num_steps=args.steps)
        if source() != data.source:
            raise SystemExit(f"the code or {RECIPE} has changed during {cell.key}: its result is of neither")
        append_line(args.json, {"key": cell.key, "cell": asdict(cell), "result": result, "source": data.source})
        seconds = reached_s(result, args.target)
        shown = {name: value for name, value in result.items() if name != "curve"}
        print(f"{cell.key}: {args.target:g} after {seconds and round(seconds, 1)} s; {shown}", flush=True)


def report(args: argparse.Namespace) -> None:
    """Print the tables of the newest source."""
    data = read(args.json)
    if data.settings is None:
        raise SystemExit(f"{args.json} holds no cells; `run` fills it")
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", default="", help="only cells whose key contains this")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--target", type=float, default=0.75, help="expected pass@1")
    parser.add_argument("--max-minutes", type=float, default=None, help="begin no cell after this many minutes")
    args = parser.parse_args()
    # as Ctrl-C does: the run that it started ends with it, and keeps no core from the next measurement
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    (run if args.command == "run" else report)(args)


if __name__ == "__main__":
    main()
