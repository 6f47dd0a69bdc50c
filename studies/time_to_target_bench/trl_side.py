"""The side of TRL: its environment, one run of its program, and the accuracy of what it saved."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from studies.accuracy import judge_of, read_tensors, rule_of
from studies.time_to_target_bench.cells import Cell, Point, Result
from studies.time_to_target_bench.workloads import ROOT, Workload
from tba.config import Recipe
from tba_cli.prompts.reader import prompts_of

VENV = ROOT / "build" / "trl-venv"
INSTALLED = VENV / ".installed"


def make_venv() -> dict[str, str]:
    """Install TRL beside the product's pinned packages, once.

    Returns:
        The versions that matter.
    """
    pip = [str(VENV / "bin/pip"), "install", "-q", "-c", str(ROOT / "deploy/constraints/main.txt")]
    if not INSTALLED.exists():
        print(f"installing TRL into {VENV} (a few minutes, once)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([*pip, "pip>=25.1"], check=True)  # the first that knows --group
        # first and pinned: by itself, pip would take the build for GPUs
        subprocess.run([*pip, "torch"], check=True)
        local = ["-e", str(ROOT), "-e", str(ROOT / "services/reward")]  # the rewards are the product's
        subprocess.run([*pip, "--group", f"{ROOT / 'pyproject.toml'}:bench", *local], check=True)
        INSTALLED.touch()
    names = ("trl", "transformers", "torch", "accelerate", "datasets")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run([str(VENV / "bin/python"), "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def run_trl(workload: Workload, cell: Cell, recipe: Recipe, folder: Path) -> Result:
    """Run one cell and measure it; `folder` is emptied."""
    versions = make_venv()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(_settings(workload, cell, recipe, folder)))
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services/reward")])}
    command = [str(VENV / "bin/python"), "-m", "studies.time_to_target_bench.trl_program"]
    with (folder / "trl.log").open("w") as log:
        done = subprocess.run(
            [*command, str(folder / "settings.json")], cwd=ROOT, env=environ, stdout=log, stderr=log, check=False
        )
    if done.returncode:
        raise SystemExit(f"error: TRL ended with {done.returncode}: {(folder / 'trl.log').read_text()[-2000:]}")
    result = _measured(workload, cell, recipe, folder, versions)
    shutil.rmtree(folder)
    return result


def _settings(workload: Workload, cell: Cell, recipe: Recipe, folder: Path) -> dict[str, Any]:
    prompts = [prompt for prompt in prompts_of(recipe) if prompt.split == "train"]
    return {
        "folder": str(folder),
        "model": recipe.model.path,
        "prompts": [{"text": prompt.text, "answer": prompt.data["answer"]} for prompt in prompts],
        "reward": rule_of(recipe).kind,
        "num_prompts": recipe.sampling.prompts_per_batch,
        "group_size": recipe.sampling.group_size,
        "micro_batch": workload.micro_batch,
        "max_response_tokens": recipe.searcher.max_response_tokens,
        "num_steps": cell.num_steps,
        "save_every_steps": workload.save_every_steps,
        "learning_rate": cell.learning_rate,
        "schedule": cell.schedule,
        "seed": cell.seed,
        "num_threads": os.cpu_count() or 1,
    }


def _measured(workload: Workload, cell: Cell, recipe: Recipe, folder: Path, versions: dict[str, str]) -> Result:
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    judge = judge_of(recipe, Path(recipe.model.path))
    start = judge.measure(read_tensors(sorted(Path(recipe.model.path).glob("*.safetensors"))))
    points = [Point(step=0, seconds=0.0, cpu_s=0.0, pass_at_1=start.pass_at_1, greedy=start.greedy)]
    for step in steps:
        if not (path := folder / f"{step['step']}.safetensors").exists():
            continue
        found = judge.measure(read_tensors([path]))
        at = {name: step[name] for name in ("step", "seconds", "cpu_s")}
        points.append(Point(**at, pass_at_1=found.pass_at_1, greedy=found.greedy))
    half = len(steps) // 2
    durations = [after["seconds"] - before["seconds"] for before, after in pairwise(steps)]
    return Result(
        cell=cell,
        points=tuple(points),
        seconds_per_step=statistics.median(durations[half:]),
        cpu_s_per_step=(steps[-1]["cpu_s"] - steps[half]["cpu_s"]) / (len(steps) - 1 - half),
        num_generated=len(steps) * recipe.sampling.prompts_per_batch * recipe.sampling.group_size,
        response_tokens_mean=statistics.mean(step["response_tokens_mean"] for step in steps),
        versions=versions,
        at_s=time.time(),
    )
