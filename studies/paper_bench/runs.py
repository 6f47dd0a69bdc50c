"""A world's models, and a cell from start to line: run it, evaluate versions of it, keep the numbers, delete it.

Everything lies in one working folder, with models and data that all cells of a world share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies.attack_modes import read_cell
from studies.pace import late_share, paced
from studies.paper_bench.arms import PACE_STEP_S, PACE_TOKENS_PER_S, START, WORLDS, Arm, Cell
from studies.whole_runs import Begin, let_go, records_of, run_module
from tba.evaluation.evaluation_job import load_report

LAST = "last"


class CellError(Exception):
    """A cell gave no result."""


def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Run a cell in the working folder, where its models are.

    Raises:
        CellError: a command failed, and not because training diverged; says where its output is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = cell.arm.document(cell.seed)
    name = str(document["run"]["name"])
    recipe = folder / f"{name}.json"
    recipe.write_text(json.dumps(document, indent=1))
    begun_at_s, load = time.monotonic(), os.getloadavg()[0]
    found = (_start if cell.arm.name == START else _trained)(cell, name, recipe, folder)
    made = {"models_sha256": models_digest(cell.arm, folder)}
    shutil.rmtree(folder / "evaluations" / name, ignore_errors=True)
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    for path in (recipe, folder / f"{name}.log"):
        path.unlink()
    conditions = {
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "wall_s": round(time.monotonic() - begun_at_s, 1),
    }
    return {**found, **made, **conditions}


def _start(cell: Cell, name: str, recipe: Path, folder: Path) -> dict[str, Any]:
    return {"evaluations": {START: _evaluation(cell, name, [recipe.name], START, folder)}}


def _trained(cell: Cell, name: str, recipe: Path, folder: Path) -> dict[str, Any]:
    checked = cell.arm.recipe(cell.seed)
    run, let_go_at_s = folder / "runs" / name, 0.0

    def hold(process: subprocess.Popen[bytes]) -> None:
        nonlocal let_go_at_s
        try:
            let_go_at_s = let_go(run, process, checked.searcher.num_searchers)
        except SystemExit as error:
            raise CellError(f"{error}; {folder / name}.log has its output") from None

    # at a pace the clock begins when all searchers are ready: how long they take to start is of this machine
    is_paced, sets, environ = cell.arm.is_paced, list[str](), dict[str, str]()
    if is_paced:
        changes, environ = paced(tokens_per_s=PACE_TOKENS_PER_S, step_s=PACE_STEP_S)
        sets = [text for key, value in changes.items() for text in ("--set", f"{key}={value}")]
    words, begin = ["run", recipe.name, "--fresh", *sets], hold if is_paced else None
    code, cpu_s = _tba(folder, name, words, may_fail=True, begin=begin, environ=environ)
    summary = json.loads(path.read_text()) if (path := run / "summary.json").is_file() else {}
    # a run that its own guards ended is a result: the objective diverged
    if code != 0 and not (summary.get("state") == "failed" and summary["steps"]):
        raise CellError(f"`tba run` ended with {code}; {folder / name}.log has its output")
    records = records_of(run)
    steps = {record["step"]: record["metrics"] for record in records if record["kind"] == "step"}
    if is_paced:
        first = next(record for record in records if record["kind"] == "step")
        held_s = max(0.0, let_go_at_s - (first["at_s"] - first["metrics"]["train_s"]))
        for metrics in (summary, *steps.values()):
            metrics["train_s"] -= held_s
    # the newest version of that step: not every step publishes one
    interval_steps = checked.trainer.sync_interval
    middle = [step for step in WORLDS[cell.arm.world].middle_steps if step < summary["steps"]]
    versions = {str(step): str(step - step % interval_steps) for step in middle} | {LAST: LAST}
    return {
        "state": summary["state"],
        "state_reason": summary["state_reason"],
        "steps": summary["steps"],
        "evaluations": {
            version: {
                "train_s": round(steps[summary["steps"] if which == LAST else int(which)]["train_s"], 1),
                **_evaluation(cell, name, [name, "--version", which], version, folder),
            }
            for version, which in versions.items()
        },
        **{key: _rounded(summary[key]) for key in KEPT},
        "ages": summary["policy_age_histogram"],
        "pace_late_share": _rounded(late_share(run / "logs")),
        "trainer_late_share": _rounded(_late_share(steps.values())),
        "cpu_s": round(cpu_s, 1),
    }


KEPT = (
    *("train_s", "first_step_s", "trainer_wait_share", "rollouts_generated", "rollouts_trained"),
    *("realised_most_on_policy", "mean_policy_age", "clipped_steps_share", "steps_skipped"),
)
"""Of summary.json."""


def _late_share(steps: Collection[Mapping[str, Any]]) -> float | None:
    """Return the share of time that a paced trainer was behind its pace; None: it has none."""
    late_s = [late for step in steps if (late := step.get("pace_late_s")) is not None]
    return sum(late_s) / sum(step["step_s"] for step in steps) if late_s else None


def _evaluation(cell: Cell, name: str, subject: Sequence[str], version: str, folder: Path) -> dict[str, Any]:
    """Run the published evaluation of a version, and return its numbers: value and standard error by name."""
    out = folder / "evaluations" / name / version
    # the run's own engine: an evaluation has no pace
    engine = cell.arm.recipe(cell.seed).searcher.engine
    _tba(folder, name, ["evaluate", *subject, "--out", str(out), "--set", f"searcher.engine={engine}"])
    report = load_report(out / "evaluation.json")
    found: dict[str, Any] = {
        "metrics": {key: [_rounded(each.value), _rounded(each.stderr)] for key, each in report.metrics.items()},
        "num_prompts": report.num_prompts,
        "num_unknown": sum(counts.num_unknown for mode in report.modes.values() for counts in mode.scores.values()),
    }
    if cell.arm.world == "redteam":
        attacks = read_cell(out)
        found["attacks"] = {
            **{key: value for key, value in asdict(attacks).items() if key in ("num_attacks", "families")},
            "num_modes": attacks.num_modes,
            "num_effective": _rounded(attacks.num_effective),
        }
    return found


def prepare(arm: Arm, folder: Path) -> None:
    """Make the arm's models where they are missing: no run of a cell is to be charged for that.

    Raises:
        CellError: it could not be done; says where the output is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"prepare-{arm.world}-{arm.name}"
    module = f"examples.worlds.{arm.world}.prepare"
    _python(folder, name, [module])
    if models_digest(arm, folder) is None:
        raise CellError(f"`{module}` left no weights in one of {', '.join(arm.models())}; delete these folders")
    (folder / f"{name}.log").unlink()


def models_digest(arm: Arm, folder: Path) -> str | None:
    """Return the digest of the weights that the arm's recipe made in the folder; None: some are missing."""
    digest, paths = hashlib.sha256(), [folder / path / "model.safetensors" for path in arm.models()]
    if not all(path.is_file() for path in paths):
        return None
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _tba(
    folder: Path,
    name: str,
    words: Sequence[str],
    *,
    may_fail: bool = False,
    begin: Begin | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[int, float]:
    """Run a command of tba; see `_python`."""
    return _python(folder, name, ["tba_cli.main", *words], may_fail=may_fail, begin=begin, environ=environ)


def _python(
    folder: Path,
    name: str,
    words: Sequence[str],
    *,
    may_fail: bool = False,
    begin: Begin | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[int, float]:
    """Run a module in the working folder; its output is added to the log of the cell.

    Args:
        words: the module and its arguments.
        begin: what to do as soon as it has been started.
        environ: more variables.

    Raises:
        CellError: it failed, and must not.
    """
    log = folder / f"{name}.log"
    # variables of the shell that are keys of recipes would be in the run, and not in the digest of its line
    found = {key: value for key, value in os.environ.items() if not (key.startswith("TBA_") and "__" in key)}
    found |= environ or {}
    code, cpu_s = run_module(words, folder=folder, log=log, environ=found, begin=begin)
    if code != 0 and not may_fail:
        raise CellError(f"`python -m {' '.join(words)}` ended with {code}; {log} has its output")
    return code, cpu_s


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
