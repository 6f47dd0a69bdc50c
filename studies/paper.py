"""The paper in small: every claim of arXiv 2503.18929 beside whole runs of this product's small recipes.

    python studies/paper.py plan   [--worlds redteam,math] [--arms TEXT] [--seeds N]       what is left, in order
    python studies/paper.py run    [--worlds ...] [--arms TEXT] [--seeds N] [--max-minutes N]
    python studies/paper.py report                                                         tables, claims.md

A cell is an arm of a world with a seed: `tba run` of the small recipe with the arm's changes, then the published
evaluation (`tba evaluate`) of its last version and of one or two before. All cells of a world in a working folder share
its models and data; `run.seed` alone differs. Every finished cell is one JSON line, and a cell that has one is not run
again: stop it at any time, start it again to go on. `make paper` runs what is left, in hours, and then reports.

The models are made in the working folder, and another processor makes others from the same recipe: it rounds otherwise.
Runs are compared with runs that began from the same models, so where a folder's models are not those of the lines, its
cells are run there whatever other models have; a figure of the report takes the pairs of all models.

A line counts when its recipe is that of the arm today: everything in it that is not a default, but for name and seed
of the run. The digest of the code and the commit are in the line and in the report, and do not decide: services are
not deterministic, so the same code would not give the same line either, and hours of cells must survive a change of a
comment. What a change of the code does to results is for who makes it to say; delete the lines that it makes wrong.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer"))]

from studies.data_file import PRODUCT, append_line, source_digest  # noqa: E402
from studies.paper_bench.arms import WORLDS, Cell, plan  # noqa: E402
from studies.paper_bench.data import DATA, num_other, read_cells  # noqa: E402
from studies.paper_bench.runs import CellError, models_digest, prepare, run_cell  # noqa: E402
from studies.paper_bench.verdicts import T_975  # noqa: E402

CLAIMS_PAGE = ROOT / "docs" / "paper" / "claims.md"
BEGIN, END = "<!-- paper:begin -->", "<!-- paper:end -->"
MAX_FAILED_IN_ROW = 3
MAX_SEEDS = 1 + len(T_975)


def asked(args: argparse.Namespace) -> list[Cell]:
    """Return the cells of the plan that are asked for, in order."""
    return [cell for cell in plan(args.worlds.split(","), range(args.seeds)) if args.arms in cell.key]


def left(args: argparse.Namespace) -> list[Cell]:
    """Return the cells that are asked for and have no line that counts, in order.

    Where the folder has the models of a cell, only lines of these count.
    """
    lines, here = read_cells(args.json).keys(), dict[tuple[str, ...], str | None]()
    found = []
    for cell in asked(args):
        models = cell.arm.models()
        if models not in here:
            here[models] = models_digest(cell.arm, args.folder)
        if not any(key == cell.key and here[models] in (None, began_with) for key, began_with in lines):
            found.append(cell)
    return found


def run(args: argparse.Namespace) -> None:
    """Run what is left, one after the other.

    Raises:
        SystemExit: another process runs cells in the folder; or cells failed: they are named, have no line, and are
            run again next time.
    """
    args.folder.mkdir(parents=True, exist_ok=True)
    lock = (args.folder / "lock").open("w")
    try:
        # it ends with the process that holds it, however that ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(
            f"another process runs cells in {args.folder}; wait for it, or give another --folder"
        ) from None
    with lock:
        _run_left(args)


def _run_left(args: argparse.Namespace) -> None:
    began_s = time.monotonic()
    broken = _unprepared(args)
    failed, in_row = [*broken], 0
    for cell in left(args):
        if args.max_minutes is not None and time.monotonic() - began_s > 60 * args.max_minutes:
            break
        if cell.arm.models() in broken.values():
            continue
        recipe, source = cell.arm.digest(), source_digest(PRODUCT)
        try:
            result = run_cell(cell, args.folder)
        except CellError as error:
            print(f"{cell.key}: {error}", file=sys.stderr, flush=True)
            failed, in_row = [*failed, cell.key], in_row + 1
            if in_row == MAX_FAILED_IN_ROW:
                break
            continue
        in_row = 0
        if cell.arm.digest() != recipe:
            raise SystemExit(f"the recipe of {cell.key} has changed meanwhile: its result is of neither")
        line = {"world": cell.arm.world, "arm": cell.arm.name, "seed": cell.seed, "recipe": recipe, "source": source}
        append_line(args.json, {"key": cell.key, **line, "result": result})
        metric = WORLDS[cell.arm.world].metric
        shown = {version: found["metrics"].get(metric) for version, found in result["evaluations"].items()}
        print(f"{cell.key}: {metric} {shown}, {result['wall_s']:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"no result of {', '.join(failed)}")


def _unprepared(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Make the models of all that is asked for, since which lines count depends on them; return which could not be."""
    failed = {}
    for models, arm in {cell.arm.models(): cell.arm for cell in asked(args)}.items():
        try:
            prepare(arm, args.folder)
        except CellError as error:
            print(f"{arm.world}: {error}", file=sys.stderr, flush=True)
            failed[f"{arm.world}/{arm.name} (its models)"] = models
    return failed


def write_report(data: Path, results: Path = CLAIMS_PAGE) -> None:
    """Write tables beside the data file, and the claims between the marks in docs/paper/claims.md.

    Raises:
        SystemExit: no line counts, or the results have no place for the claims.
    """
    from studies.paper_bench.evidence import Evidence
    from studies.paper_bench.tables import section_text, tables_text

    evidence = Evidence.of(data)
    if not evidence.cells:
        raise SystemExit(f"no line of {data} is of a recipe of today, so nothing is written; `run` makes such lines")
    text = results.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{results} must hold {BEGIN} and {END} once each: the claims go between them")
    before, _, rest = text.partition(BEGIN)
    (data.parent / "tables.md").write_text(tables_text(evidence, num_other(data)))
    results.write_text(f"{before}{BEGIN}\n{section_text(evidence)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Plan, run or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plan", "run", "report"])
    parser.add_argument("--json", type=Path, default=DATA, help="the data file")
    parser.add_argument("--worlds", default=",".join(WORLDS), help="with commas")
    parser.add_argument("--arms", default="", help="only cells whose key (WORLD/ARM/seedN) contains this")
    parser.add_argument("--seeds", type=int, default=3, help="0 to N - 1")
    parser.add_argument("--max-minutes", type=float, default=None, help="begin no cell after this many minutes")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "paper", help="working folder: models, data, runs"
    )
    args = parser.parse_args()
    if unknown := set(args.worlds.split(",")) - WORLDS.keys():
        parser.error(f"--worlds {sorted(unknown)[0]!r} is none of {', '.join(WORLDS)}")
    if not 1 <= args.seeds <= MAX_SEEDS:
        parser.error(f"--seeds {args.seeds} is out of range; give 1 to {MAX_SEEDS}")
    if not asked(args):
        parser.error(f"--arms {args.arms!r} is part of no cell of {args.worlds}; `plan` shows what is left")
    # as Ctrl-C does: the run that it started ends with it, and keeps no core from the next measurement
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.command == "plan":
        for cell in left(args):
            print(cell.key)
        if unmade := sorted({cell.arm.world for cell in asked(args) if models_digest(cell.arm, args.folder) is None}):
            print(
                f"{args.folder} has no models of {', '.join(unmade)} yet: where it makes others than those of the "
                "lines, more is left",
                file=sys.stderr,
            )
    elif args.command == "run":
        args.folder = args.folder.resolve()
        run(args)
    else:
        write_report(args.json)


if __name__ == "__main__":
    main()
