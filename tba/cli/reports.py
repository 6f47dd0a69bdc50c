"""`tba report` and `tba table`: what finished runs achieved, from their saved history."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.local.history import load_history
from tba.local.outputs import result_lines, write_outputs
from tba.local.run_folder import RunFolder

COLUMNS = (
    ("run", "run", ""),
    ("seed", "seed", "d"),
    ("start accuracy", "start_accuracy", ".3f"),
    ("final accuracy", "final_accuracy", ".3f"),
    ("gain", "gain", "+.3f"),
    ("start greedy", "start_greedy", ".3f"),
    ("final greedy", "final_greedy", ".3f"),
    ("steps", "steps", "d"),
    ("train_s", "train_s", ".0f"),
    ("first_step_s", "first_step_s", ".1f"),
    ("trainer_wait_share", "trainer_wait_share", ".3f"),
    ("realised m", "realised_most_on_policy", ".3f"),
    ("rollouts", "rollouts_generated", "d"),
)
"""Heading, key of summary.json, number format."""


def report_command(args: argparse.Namespace) -> int:
    """Write summary.json, report.html and report.png again."""
    folder = RunFolder(Path(args.run_dir))
    summary = write_outputs(folder, load_history(folder.history_path))
    print("\n".join(result_lines(summary, folder)))
    return 0


def table_command(args: argparse.Namespace) -> int:
    """Print one Markdown row per run."""
    summaries = [_read_summary(Path(run_dir)) for run_dir in args.run_dirs]
    print("\n".join(markdown_table(summaries)))
    return 0


def markdown_table(summaries: list[dict[str, Any]]) -> list[str]:
    """Lines of the table; what a run does not know is an en dash."""
    lines = ["| " + " | ".join(heading for heading, _, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for summary in summaries:
        cells = [_cell(summary.get(key), form) for _, key, form in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); is {run_dir} the folder of a finished run?"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON ({error}); make it again with `tba report {run_dir}`") from None
