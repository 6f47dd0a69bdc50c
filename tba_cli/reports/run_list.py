"""The runs of a folder: states, newest numbers, curves and logs, from their files alone; a run may be in progress."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from tba_buffer.monitoring.curves import thin

from tba.errors import ConfigError, NotFoundError
from tba_cli.reports.history import load_end
from tba_cli.run_folder import MARKER, RunFolder

MAX_POINTS = 300
NUM_RECENT = 10
"""Steps whose mean reward the list shows."""
LOG_BYTES = 256 * 1024
"""Size of the end of a log that is shown."""
MAX_KEPT = 512
"""Most runs whose curves stay in memory until their files change."""
UNREADABLE = (ConfigError, OSError, AttributeError, KeyError, TypeError, ValueError)
"""What files raise that no run has written."""


def run_folders(place: Path) -> dict[str, RunFolder]:
    """Return the run folders in a folder by name, the one that was started last first."""
    found = [RunFolder(path.parent) for path in place.glob(f"*/{MARKER}")]
    return {folder.path.name: folder for folder in sorted(found, key=lambda one: one.locked_at_ns, reverse=True)}


def run_row(folder: RunFolder) -> dict[str, Any]:
    """Return what the list shows of a run; None: unknown, or not so far."""
    row: dict[str, Any] = {"name": folder.path.name, "state": "not begun", "reason": None}
    try:
        folder.check_entries()
        recipe = json.loads(folder.recipe_path.read_bytes()) if folder.has_begun else {}
        if folder.is_in_use:
            row["state"] = "running" if folder.has_begun else "starting"
        elif folder.is_finished:
            summary = json.loads(folder.summary_path.read_bytes())
            found = summary.get("summary") or {}  # what the page of the run says
            row |= {"state": found.get("state", summary["state"])}
            row |= {"reason": found.get("finding", summary.get("state_reason"))}
        elif folder.has_begun:
            row |= {"state": "interrupted", "reason": load_end(folder).reason}
        parts = {name: recipe.get(name, {}) for name in ("trainer", "model", "objective")}
        row |= {"num_steps": parts["trainer"].get("num_steps"), "objective": parts["objective"].get("preset")}
        row |= {"model": Path(parts["model"].get("path", "")).name} | _numbers(folder)["newest"]
        return row | {"started_at_s": row["started_at_s"] or folder.locked_at_ns / 1e9}
    except UNREADABLE as error:
        return row | {"state": "unreadable", "reason": f"{type(error).__name__}: {error}"}


def run_details(folder: RunFolder) -> dict[str, Any]:
    """Return recipe, names of the logs, and curves of the steps and of the evaluations of a run."""
    recipe, curves = {}, {"steps": _curve([]), "evaluations": _curve([])}
    # its row says why; the page shows other runs beside it
    with suppress(*UNREADABLE):
        folder.check_entries()
        recipe = json.loads(folder.recipe_path.read_bytes()) if folder.has_begun else {}
        curves = _numbers(folder)["curves"]
    return {"recipe": recipe, "logs": _logs(folder), **curves}


def end_of_log(folder: RunFolder, name: str) -> str:
    """Return the last LOG_BYTES of a log."""
    if name not in _logs(folder):
        raise NotFoundError(f"run {folder.path.name!r} has no log {name!r}")
    with folder.log_path(name).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
        return file.read(LOG_BYTES).decode(errors="replace")


def _logs(folder: RunFolder) -> list[str]:
    # no links: the folder may come from another person
    return sorted(path.stem for path in folder.logs_path.glob("*.log") if path.is_file() and not path.is_symlink())


def _numbers(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / "metrics.jsonl"
    is_there = path.is_file() and not path.is_symlink()
    return _read(path, path.stat().st_mtime_ns, path.stat().st_size) if is_there else _read(path, 0, 0)


@lru_cache(maxsize=MAX_KEPT)
def _read(path: Path, _mtime_ns: int, size: int) -> dict[str, Any]:
    """Read metrics.jsonl, without what a resume has abandoned and lines that cannot be read, such as half of one."""
    found: dict[str, list[dict[str, Any]]] = {"step": [], "evaluation": []}
    started_at_s = None
    for line in path.read_bytes().splitlines() if size else ():
        try:
            record = json.loads(line)
            started_at_s = started_at_s or record["at_s"]
            if record["kind"] == "start":
                found = {kind: [one for one in some if one["step"] <= record["step"]] for kind, some in found.items()}
            else:
                values = {name: None if one is None else float(one) for name, one in record["metrics"].items()}
                point = {"step": int(record["step"]), "at_s": float(record["at_s"]), "metrics": values}
                found[record["kind"]].append(point)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    steps, evaluations = found["step"], sorted(found["evaluation"], key=lambda one: one["step"])
    rewards = [one["metrics"].get("reward_mean") for one in steps[-NUM_RECENT:]]
    rewards = [reward for reward in rewards if reward is not None]
    newest = {
        "step": steps[-1]["step"] if steps else 0,
        "reward": fmean(rewards) if rewards else None,
        "accuracy": evaluations[-1]["metrics"].get("accuracy") if evaluations else None,
        "started_at_s": started_at_s,
    }
    return {"newest": newest, "curves": {"steps": _curve(steps), "evaluations": _curve(evaluations)}}


def _curve(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return steps, times and values of at most MAX_POINTS points; several steps become one by their mean."""
    each = max(1, -(-len(records) // MAX_POINTS))
    lasts = [records[min(at + each, len(records)) - 1] for at in range(0, len(records), each)]
    names = dict.fromkeys(name for record in records for name in record["metrics"])
    columns = {name: np.array([record["metrics"].get(name) for record in records], dtype=float) for name in names}
    values = {name: thin(column, each) for name, column in columns.items()}
    return {"steps": [one["step"] for one in lasts], "at_s": [one["at_s"] for one in lasts], "values": values}
