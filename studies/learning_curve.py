"""The learning curve of a finished run: accuracy of every published version, and when it was there.

    python studies/learning_curve.py runs/NAME [--every-steps N]        JSON: one line per version

Measured after the run (studies/accuracy.py), so it costs the run nothing and its resolution is
`trainer.sync_interval`. Set `trainer.keep_versions = KEEP_ALL` in the run, or garbage collection deletes most versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher"))]

from studies.accuracy import judge_of, read_tensors  # noqa: E402
from tba.config import parse_recipe  # noqa: E402
from tba.errors import ConfigError  # noqa: E402
from tba.store import FileStore  # noqa: E402
from tba.versions import PolicyVersion  # noqa: E402
from tba.weights import WeightVersions  # noqa: E402
from tba_cli.run_folder import RunFolder  # noqa: E402

KEEP_ALL = 1_000_000
"""For `trainer.keep_versions`."""
NUM_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published version."""

    train_s: float
    """Seconds from the start of training to the end of the step that made it; 0 for the starting model."""
    version: str
    step: int
    pass_at_1: float
    """At the policy temperature; exact or sampled, as the reward is (`Judge`)."""
    greedy: float
    """Share of right greedy answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The versions of one run, oldest first."""

    first_batch_s: float
    """Seconds from the start of training to the first batch: what searchers and buffer need before anything can be
    trained. `train_s - first_batch_s` is the clock of a trainer that generates for itself."""
    started_at_s: float
    """Unix seconds of the start of training."""
    points: tuple[Point, ...]


def learning_curve(run_folder: Path, *, every_steps: int = 1, num_prompts: int = NUM_PROMPTS) -> Curve:
    """Measure the versions of a finished local run.

    Args:
        every_steps: leave out versions that are not this many steps after the one before; the last is never left out.

    Raises:
        ConfigError: the run is not finished, was started more than once, or its task cannot be measured.
    """
    folder = RunFolder(run_folder)
    if not folder.is_finished:
        raise ConfigError(f"{run_folder} holds no finished run (no {folder.summary_path.name})")
    recipe = parse_recipe(json.loads(folder.recipe_path.read_text()), where=str(folder.recipe_path))
    seconds, first_batch_s, started_at_s = _step_times(folder.path / "metrics.jsonl")
    versions = WeightVersions(FileStore(folder.store_path), recipe.run.name)
    known = [version for version in versions.versions() if version.step == 0 or version.step in seconds]
    chosen, points = _thinned(known, every_steps), list[Point]()
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
                    version=str(version),
                    step=version.step,
                    pass_at_1=round(found.pass_at_1, 5),
                    greedy=round(found.greedy, 5),
                )
            )
            shutil.rmtree(Path(scratch) / str(version))
    return Curve(first_batch_s=round(first_batch_s, 3), started_at_s=started_at_s, points=tuple(points))


def _step_times(path: Path) -> tuple[dict[int, float], float, float]:
    """Return step -> seconds from the start of training to its end, seconds to the first batch, and when it started."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    if sum(record["kind"] == "start" for record in records) != 1:
        raise ConfigError(f"{path}: the trainer was started more than once, so its clock has gaps")
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        raise ConfigError(f"{path}: no step was made")
    first = steps[0]["metrics"]
    started_at_s = steps[0]["at_s"] - first["train_s"]
    return {r["step"]: r["metrics"]["train_s"] for r in steps}, first["train_s"] - first["step_s"], started_at_s


def _thinned(versions: list[PolicyVersion], every_steps: int) -> list[PolicyVersion]:
    chosen: list[PolicyVersion] = []
    for version in versions:
        if not chosen or version.step - chosen[-1].step >= every_steps or version is versions[-1]:
            chosen.append(version)
    return chosen


def main() -> None:
    """Print the curve of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--every-steps", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS)
    args = parser.parse_args()
    curve = learning_curve(args.run_folder, every_steps=args.every_steps, num_prompts=args.num_prompts)
    print(json.dumps({"first_batch_s": curve.first_batch_s, "num_versions": len(curve.points)}))
    for point in curve.points:
        print(json.dumps(asdict(point)))


if __name__ == "__main__":
    main()
