"""The study of asynchrony: which objective at which lag.

    python studies/asynchrony.py plan   [--json FILE] [--cells TEXT]           what can be run now, best first
    python studies/asynchrony.py run    [--json FILE] [--cells TEXT] [--max-minutes N] [--workers N]
    python studies/asynchrony.py report [--json FILE] [--out FOLDER]           tables from the data

`make study` runs all of it, in hours. One thread per worker, no services. Every finished cell is one JSON line with the
digest of the code that decided it, and a cell that has a line of this code is not run again: stop it at any time, and
start it again to go on. `--cells` takes part of a key, for example
`addition/tba_prime/lag16`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "buffer"), str(ROOT / "services" / "trainer")]

from studies.study.data import read_cells, sources_digest  # noqa: E402
from studies.study.plan import Study  # noqa: E402

DATA = ROOT / "docs" / "asynchrony" / "cells.jsonl"


def main() -> None:
    """Plan, run or report; the data file is appended to, cell by cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plan", "run", "report"])
    parser.add_argument("--json", type=Path, default=DATA, help="the data file")
    parser.add_argument("--cells", default="", help="only cells whose key contains this")
    parser.add_argument("--max-minutes", type=float, default=None, help="begin no cell after this many minutes")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side: one for each free core")
    parser.add_argument("--models", type=Path, default=ROOT / "models" / "study", help="folder of starting models")
    parser.add_argument("--out", type=Path, default=DATA.parent, help="folder of the tables")
    args = parser.parse_args()
    # as Ctrl-C does: its processes end with it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.command == "plan":
        for cell in Study(read_cells(args.json, sources_digest())).plan():
            if args.cells in cell.key:
                print(cell.key)
    elif args.command == "run":
        from studies.study.run import run_cells

        run_cells(
            args.json, models=args.models, only=args.cells, max_minutes=args.max_minutes, num_workers=args.workers
        )
    else:
        from studies.study.report import write_report

        write_report(args.json, args.out)


if __name__ == "__main__":
    main()
