"""Runs cells, one after the other, until the plan is done or the time is up."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.study.cells import NUM_STEPS, Cell, plan
from benchmarks.study.data import append_line, read_lines
from benchmarks.study.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("services/trainer/tba_trainer", "benchmarks/study")
"""The code that decides results; its digest stands in every line."""


def run_cells(path: Path, *, models: Path, only: str = "", max_minutes: float | None = None, commit: str = "") -> None:
    """Run cells whose key contains `only` and append a line for each.

    Raises:
        SystemExit: another process is writing this file.
    """
    deadline_s = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    source = {"commit": commit or _commit(), "sources_sha256": _sources_sha256()}
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another process runs cells with {models}; stop it, or give --models") from None
        while deadline_s is None or time.monotonic() < deadline_s:
            lines = read_lines(path)
            cell = next((cell for cell in plan(lines) if only in cell.key), None)
            if cell is None:
                return
            began_s = time.monotonic()
            result = run_cell(cell, models)
            append_line(path, cell, result, source)
            print(f"{len(lines) + 1:4d} {cell.key}: {_shown(result)}, {time.monotonic() - began_s:.0f} s", flush=True)


def run_cell(cell: Cell, models: Path) -> dict[str, Any]:
    """The result of one cell."""
    from benchmarks.study.gradients import gradient_noise
    from benchmarks.study.training import Settings, train
    from benchmarks.study.world import starting_model

    start = starting_model(models, cell.seed)
    if cell.kind == "k":
        return gradient_noise(start, group_size=cell.group_size, beta=cell.beta, seed=cell.seed)
    settings = Settings(
        objective=METHODS[cell.method].section(cell.beta),
        learning_rate=cell.learning_rate,
        lag=cell.lag,
        seed=cell.seed,
        num_steps=NUM_STEPS,
        most_on_policy_prob=cell.most_on_policy_prob,
        group_size=cell.group_size,
        raw_scale=cell.scaling == "raw",
        beta_then=cell.beta_then,
        give_up_below=0.25 if cell.kind == "tune" else 0.0,
    )
    return train(settings, start)


def _shown(result: Mapping[str, Any]) -> str:
    if "curve" not in result:
        return ", ".join(f"{name} {value}" for name, value in result.items() if name != "cpu_s")
    sampled = result["curve"]["sampled"]
    return f"{sampled[0]:.3f} -> {sampled[-1]:.3f} (best {max(sampled):.3f}), {result['cpu_s']} CPU s"


def _commit() -> str:
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _sources_sha256() -> str:
    digest = hashlib.sha256()
    for folder in MEASURED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
