"""Cells, which are whole runs of the quickstart: measuring the pace, and a cell from start to learning curve."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.learning_curve import KEEP_ALL, learning_curve
from studies.pace import late_share, paced
from studies.whole_runs import ROOT, let_go, records_of, run_module

RECIPE = ROOT / "recipes" / "quickstart.toml"
NUM_SEARCHERS = (1, 2, 4, 8)
NUM_SLOTS = 32
MEASURED_STEPS, WARM_STEPS = 48, 8
"""Of the run that sets the pace; the warm ones do not count."""
RATIO, SLOWDOWN = 4.0, 20.0
"""One searcher generates a batch in so many steps; a rehearsed step takes so many measured ones, so that four searchers
and the services fit on two cores."""
CHANGES: dict[str, Any] = {
    # the learning curve is measured after the run, from its versions
    "eval.every_steps": 1_000_000,
    "eval.num_prompts": 4,
    "eval.num_prompts_final": 4,
    # lock-step trains on one batch, so a version comes every step
    "trainer.sync_interval": 1,
    "sampling.samples_per_insert_error": 128,
}
"""What every run changes in the recipe, by dotted key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    seed: int
    searchers: int
    lock_step: bool = False
    """Generate for one sync interval, then train for one, never both at once (`sampling.alternate`)."""

    @property
    def name(self) -> str:
        """What the runs of all seeds have in common."""
        return f"searchers-n{self.searchers}-{'lock' if self.lock_step else 'async'}"

    @property
    def key(self) -> str:
        """The cell's name: all that decides its result, but for the settings of the data file and the code."""
        return f"{self.name}-seed{self.seed}"

    def changes(self) -> dict[str, Any]:
        """Return the changes of the recipe, by dotted key."""
        return {"searcher.num_searchers": self.searchers, "sampling.alternate": str(self.lock_step).lower()}


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all cells seed by seed, so that a broken-off run has whole pairs."""
    for seed, searchers, lock_step in itertools.product(seeds, NUM_SEARCHERS, (False, True)):
        yield Cell(seed=seed, searchers=searchers, lock_step=lock_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The GPUs that are rehearsed; the same for all cells of a data file."""

    measured_step_s: float
    """Median optimizer step on this machine, alone."""
    tokens_per_batch: float
    ratio: float
    """How many times as long as a step one searcher takes to generate a batch."""
    slowdown: float
    """A rehearsed step takes this many measured ones, so that all processes together fit on the cores."""
    num_slots: int

    @property
    def step_s(self) -> float:
        """Seconds of a rehearsed optimizer step."""
        return self.slowdown * self.measured_step_s

    @property
    def tokens_per_s(self) -> float:
        """Of one rehearsed searcher."""
        return self.tokens_per_batch / (self.ratio * self.step_s)

    def changes(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the changes of the recipe, by dotted key, and variables of the run."""
        changes, environ = paced(tokens_per_s=self.tokens_per_s, step_s=self.step_s)
        return {"searcher.num_slots": self.num_slots, **changes}, environ


def measure_pace() -> Pace:
    """Measure steps that nothing runs beside: in turns with one searcher, without a pace."""
    changes = {**CHANGES, **Cell(seed=0, searchers=1, lock_step=True).changes(), "trainer.num_steps": MEASURED_STEPS}
    folder = _run("overlap-pace", changes, {}, seed=0, num_searchers=None).folder
    steps = _steps(folder)[WARM_STEPS:]
    shutil.rmtree(folder)
    return Pace(
        measured_step_s=round(statistics.median(step["step_s"] for step in steps), 4),
        tokens_per_batch=round(statistics.median(step["num_tokens"] for step in steps), 1),
        ratio=RATIO,
        slowdown=SLOWDOWN,
        num_slots=NUM_SLOTS,
    )


def run_cell(cell: Cell, pace: Pace, *, num_steps: int) -> dict[str, Any]:
    """Run a cell; seconds count from the moment at which all searchers were there and the run was let go."""
    slowed, environ = pace.changes()
    changes = {
        **CHANGES,
        "trainer.num_steps": num_steps,
        "trainer.max_train_s": 1_000_000,
        "trainer.keep_versions": KEEP_ALL,
        "trainer.export": "false",
        **slowed,
        **cell.changes(),
    }
    done = _run(f"overlap-{cell.key}", changes, environ, seed=cell.seed, num_searchers=cell.searchers)
    summary = json.loads((done.folder / "summary.json").read_text())
    steps, curve = _steps(done.folder), learning_curve(done.folder)
    let_go_s = done.let_go_at_s - curve.started_at_s
    late_s = sum(step["pace_late_s"] for step in steps)
    engines_late_share = late_share(done.folder / "logs")
    shutil.rmtree(done.folder)
    return {
        "curve": [
            [round(max(0.0, point.train_s - let_go_s), 3), point.step, point.pass_at_1, point.greedy]
            for point in curve.points
        ],
        "num_steps": num_steps,
        "train_s": round(steps[-1]["train_s"] - let_go_s, 2),
        "trainer_idle_share": summary["trainer_wait_share"],
        "mean_policy_age": summary["mean_policy_age"],
        "rollouts_generated": summary["rollouts_generated"],
        "rollouts_trained": summary["rollouts_trained"],
        "pace_late_share": engines_late_share,
        "trainer_late_share": late_s / sum(step["step_s"] for step in steps),
        "cpu_s": round(done.cpu_s, 1),
    }


@dataclass(slots=True)
class _Done:
    folder: Path
    let_go_at_s: float = 0.0
    """Unix seconds."""
    cpu_s: float = 0.0


def _run(
    name: str, changes: Mapping[str, Any], environ: Mapping[str, str], *, seed: int, num_searchers: int | None
) -> _Done:
    """Run `tba run` to its end; with `num_searchers` it is held until so many are ready."""
    sets = [text for key, value in changes.items() for text in ("--set", f"{key}={value}")]
    words = ["tba_cli.main", "run", str(RECIPE), "--run-name", name, "--seed", str(seed), "--fresh", *sets]
    log, done = ROOT / "runs" / f"{name}.log", _Done(ROOT / "runs" / name)
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)

    def hold(process: subprocess.Popen[bytes]) -> None:
        if num_searchers is not None:
            done.let_go_at_s = let_go(done.folder, process, num_searchers)

    code, done.cpu_s = run_module(words, folder=ROOT, log=log, environ={**os.environ, **environ}, begin=hold)
    if code != 0:
        raise SystemExit(f"{name} ended with {code}: {log.read_text()[-2000:]}")
    log.unlink()
    return done


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [record["metrics"] for record in records_of(folder) if record["kind"] == "step"]
