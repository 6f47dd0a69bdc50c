"""`tba table` and `tba ledger check`: results of runs, and a check that every step was taken once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tba.api import RunInfo
from tba.clients import BufferClient
from tba.errors import ConfigError
from tba_cli.commands.rollouts import with_run
from tba_cli.console import print_answer
from tba_cli.reports.comparison import runs_markdown
from tba_cli.reports.ledger import LedgerCheck, ledger_lines, lineage_tree
from tba_cli.run_folder import RunFolder

EXIT_VIOLATION = 1
MAX_SHOWN = 20
MAX_READINGS = 5


def table_command(args: argparse.Namespace) -> int:
    """Print one Markdown row per run."""
    summaries = [read_summary(Path(run_dir)) for run_dir in args.run_dirs]
    print(json.dumps(summaries, indent=1) if args.json else runs_markdown(summaries))
    return 0


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    RunFolder(run_dir).check_entries()
    path = run_dir / "summary.json"
    try:
        if not isinstance(summary := json.loads(path.read_bytes()), dict) or "steps" not in summary:
            raise ValueError("it has no steps")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); is {run_dir} the folder of a finished run?"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not the summary of a run ({error}); delete it, and `tba run --resume` writes it again"
        ) from None
    return summary


def check_command(args: argparse.Namespace) -> int:
    """Check the ledger of a run in progress, or of an ended run from its files; return 1 on a violation."""

    def read(client: BufferClient) -> tuple[RunInfo, LedgerCheck]:
        # read both again when another trainer started meanwhile: other entries are abandoned then
        for _ in range(MAX_READINGS):
            # the run is read first: entries acked in between are newer than `step`
            info = client.run()
            check = LedgerCheck(lineage_tree(info.parents), lineage=info.lineage, step=info.step, origin=info.origin)
            for line in ledger_lines(client):
                check.take(line)
            if client.run().lineage == info.lineage:
                break
        return info, check

    info, check = with_run(args, read)
    violations = check.violations()
    document = {
        "run": info.run,
        "violations": violations,
        "num_steps": info.step,
        "num_batches": check.num_batches,
        "num_abandoned": check.num_abandoned,
        "num_skipped": check.num_skipped,
        "num_starts": check.num_starts,
        "lineage": info.lineage,
        "forked_from": None if check.forked_from is None else str(check.forked_from),
    }
    # one lost entry can make every later one a violation
    lines = violations[:MAX_SHOWN]
    if len(violations) > MAX_SHOWN:
        lines.append(f"... and {len(violations) - MAX_SHOWN} more")
    fork = "" if check.forked_from is None else f", forked from {check.forked_from} of another run"
    counts = (
        f"{info.step} steps, {check.num_batches} batches, {check.num_abandoned} of them abandoned, "
        f"{check.num_skipped} skipped, "
        f"trainer starts: {check.num_starts}, active lineage {info.lineage}{fork}"
    )
    result = f"{len(violations)} violations" if violations else "every step of the active lineage exactly once"
    lines.append(f"ledger of {info.run!r}: {result} ({counts})")
    print_answer(document, lines, as_json=args.json)
    return EXIT_VIOLATION if violations else 0
