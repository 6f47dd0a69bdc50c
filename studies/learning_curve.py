"""The learning curve of a finished run: accuracy of every published version, and when it was there.

Measured after the run (studies/accuracy.py), so it costs the run nothing and its resolution is
`trainer.sync_interval`. Set `trainer.keep_versions = KEEP_ALL` in the run, or garbage collection deletes most versions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from studies.accuracy import judge_of, read_tensors
from studies.whole_runs import records_of
from tba.config import parse_recipe
from tba.errors import ConfigError
from tba.store import FileStore
from tba.weights import WeightVersions
from tba_cli.run_folder import RunFolder

KEEP_ALL = 1_000_000
"""For `trainer.keep_versions`."""
NUM_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published version."""

    train_s: float
    """Seconds from the start of training to the end of the step that made it; 0 for the starting model."""
    step: int
    pass_at_1: float
    """At the policy temperature; exact or sampled, as the reward is (`Judge`)."""
    greedy: float
    """Share of right greedy answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The versions of one run, oldest first."""

    started_at_s: float
    """Unix seconds of the start of training."""
    points: tuple[Point, ...]


def learning_curve(run_folder: Path, *, num_prompts: int = NUM_PROMPTS) -> Curve:
    """Measure the versions of a finished local run.

    Raises:
        ConfigError: the run is not finished, was started more than once, or its task cannot be measured.
    """
    folder = RunFolder(run_folder)
    if not folder.is_finished:
        raise ConfigError(f"{run_folder} holds no finished run (no {folder.summary_path.name})")
    recipe = parse_recipe(json.loads(folder.recipe_path.read_text()), where=str(folder.recipe_path))
    seconds, started_at_s = _step_times(folder.path / "metrics.jsonl")
    versions = WeightVersions(FileStore(folder.store_path), recipe.run.name)
    chosen = [version for version in versions.versions() if version.step == 0 or version.step in seconds]
    points = list[Point]()
    with tempfile.TemporaryDirectory(prefix="tba-learning-curve-") as scratch:
        model_folder = Path(scratch) / "model"
        model_folder.mkdir()
        versions.download(chosen[0], model_folder)
        judge = judge_of(recipe, model_folder, num_prompts)
        for version in chosen:
            weights = versions.download_tensors(version, Path(scratch) / str(version))
            found = judge.measure(read_tensors(weights.paths))
            points.append(
                Point(
                    train_s=round(seconds.get(version.step, 0.0), 3),
                    step=version.step,
                    pass_at_1=round(found.pass_at_1, 5),
                    greedy=round(found.greedy, 5),
                )
            )
            shutil.rmtree(Path(scratch) / str(version))
    return Curve(started_at_s=started_at_s, points=tuple(points))


def _step_times(path: Path) -> tuple[dict[int, float], float]:
    """Return step -> seconds from the start of training to its end, and when it started."""
    records = records_of(path.parent)
    if sum(record["kind"] == "start" for record in records) != 1:
        raise ConfigError(f"{path}: the trainer was started more than once, so its clock has gaps")
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        raise ConfigError(f"{path}: no step was made")
    started_at_s = steps[0]["at_s"] - steps[0]["metrics"]["train_s"]
    return {r["step"]: r["metrics"]["train_s"] for r in steps}, started_at_s
