"""`python -m tests.system.chaos`: a chaos run of some minutes, its survival table, and its verdict (exit code 0, 1)."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.system.chaos.campaign import run_campaign
from tests.system.chaos.table import survival_table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="chaos", description="Hurt a whole run in every way, and count what was lost."
    )
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("CHAOS_MINUTES", "30")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("CHAOS_SEED", "0")))
    parser.add_argument("--model", type=Path, default=None, help="starting model; default: the quickstart's, made here")
    parser.add_argument("--folder", type=Path, default=None, help="where logs and data go; default: runs/chaos-TIME")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as with Ctrl-C: nothing is left running
    folder: Path = args.folder or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = folder.absolute()
    folder.mkdir(parents=True)
    say(f"chaos for {args.minutes:g} minutes, seed {args.seed}, in {folder}")
    model = args.model.absolute() if args.model else _starting_model(folder / "start")
    begun_s = time.monotonic()
    verdict, trials = run_campaign(folder / "run", model, seed=args.seed, seconds=60 * args.minutes, say=say)
    now = datetime.datetime.now(datetime.UTC)
    lines = [
        f"{now:%Y-%m-%d %H:%M} UTC, seed {args.seed}, {args.minutes:g} minutes of faults, "
        f"{(time.monotonic() - begun_s) / 60:.1f} minutes in all, {len(trials)} faults",
        "",
        survival_table(trials),
        "",
        *(
            f"- {name}: {json.dumps(value) if isinstance(value, dict | list) else value}"
            for name, value in verdict.counts.items()
        ),
        "",
        *(f"WRONG: {sentence}" for sentence in verdict.wrong),
        "verdict: " + (f"{len(verdict.wrong)} promises broken" if verdict.wrong else "every promise was kept"),
    ]
    (folder / "survival.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if verdict.wrong else 0


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _starting_model(folder: Path) -> Path:
    from tests.support.chat_tokenizers import make_talking_model

    return make_talking_model(folder)


if __name__ == "__main__":
    sys.exit(main())
