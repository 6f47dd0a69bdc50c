"""The side of tba: one whole run of `tba run`, its clock from its logs, and the accuracy of what it published."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from studies.accuracy import judge_of, read_tensors
from studies.time_to_target_bench.cells import Cell, Point, Result
from studies.time_to_target_bench.workloads import ROOT, Workload
from studies.whole_runs import records_of
from tba import __version__
from tba.config import Recipe
from tba.store import FileStore
from tba.weights import WeightVersions
from tba_cli.run_folder import RunFolder

SERVICES = ("buffer", "reward", "searcher", "trainer")
NAME = "time-to-target"


class CpuClock(threading.Thread):
    """CPU seconds of a process with all its children, sampled until it ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._at_s: list[float] = []
        self._cpu_s: list[float] = []

    def run(self) -> None:
        """Sample every 0.1 s."""
        latest: dict[tuple[int, float], float] = {}
        root = psutil.Process(self._process.pid)
        while self._process.poll() is None:
            try:
                for each in (root, *root.children(recursive=True)):
                    times = each.cpu_times()
                    # pids come again: the time of creation tells two of them apart
                    latest[each.pid, each.create_time()] = times.user + times.system
            except psutil.Error:
                pass  # one has just ended; its last sample stays
            self._at_s.append(time.time())
            self._cpu_s.append(sum(latest.values()))
            time.sleep(0.1)

    def at(self, at_s: float) -> float:
        """Return CPU seconds at a time, on the line between two samples."""
        after = min(max(bisect_left(self._at_s, at_s), 1), len(self._at_s) - 1)
        (begin, end), (low, high) = self._at_s[after - 1 : after + 1], self._cpu_s[after - 1 : after + 1]
        return low + (high - low) * min(max((at_s - begin) / (end - begin), 0.0), 1.0)


def tba_sets(workload: Workload, cell: Cell) -> list[str]:
    """Return the `--set` values of a cell: no evaluation and no export during it, and every version is kept."""
    return [
        f"trainer.num_steps={cell.num_steps}",
        f"trainer.learning_rate={_schedule(cell)}",
        "trainer.max_train_s=100000",
        "trainer.keep_versions=1000000",
        f"trainer.checkpoint_interval={10 * cell.num_steps}",
        "trainer.export=false",
        f"eval.every_steps={10 * cell.num_steps}",
        "eval.num_prompts=1",
        "eval.num_prompts_final=1",
        *cell.settings,
    ]


def _schedule(cell: Cell) -> str:
    ends = "" if cell.schedule == "constant" else f", final = 0.0, steps = {cell.num_steps}"
    return f'{{ kind = "{cell.schedule}", value = {cell.learning_rate}{ends} }}'


def run_tba(workload: Workload, cell: Cell, recipe: Recipe, folder: Path) -> Result:
    """Run one cell and measure it; `folder` is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    paths = [ROOT, *(ROOT / "services" / service for service in SERVICES)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "tba_cli.main", "run", str(workload.recipe), "--fresh", "--quiet"]
    command += ["--run-name", NAME, "--seed", str(cell.seed)]
    for item in [*tba_sets(workload, cell), f'local.runs_dir="{folder}"']:
        command += ["--set", item]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cpu = CpuClock(process)
    cpu.start()
    output = process.communicate()[0].decode()
    cpu.join()
    if process.returncode:
        raise SystemExit(f"error: tba ended with {process.returncode}: {output[-2000:]}")
    result = _measured(workload, cell, recipe, RunFolder(folder / NAME), cpu)
    shutil.rmtree(folder)
    return result


def _measured(workload: Workload, cell: Cell, recipe: Recipe, folder: RunFolder, cpu: CpuClock) -> Result:
    records = records_of(folder.path)
    steps = {r["step"]: r for r in records if r["kind"] == "step"}
    begin_s = first_engine_ready_s(folder.path / "logs")
    judge = judge_of(recipe, Path(recipe.model.path))
    versions = WeightVersions(FileStore(folder.store_path), NAME)
    points: list[Point] = []
    for version in versions.versions():
        is_last = version.step == cell.num_steps
        if points and version.step - points[-1].step < workload.save_every_steps and not is_last:
            continue
        weights = versions.download_tensors(version, folder.path / "tensors" / str(version))
        found = judge.measure(read_tensors(weights.paths))
        at_s = steps[version.step]["at_s"] if version.step else begin_s
        points.append(
            Point(
                step=version.step,
                seconds=at_s - begin_s,
                cpu_s=cpu.at(at_s) - cpu.at(begin_s),
                pass_at_1=found.pass_at_1,
                greedy=found.greedy,
            )
        )
    in_order = [steps[step] for step in sorted(steps)]
    half = len(in_order) // 2
    durations = [after["at_s"] - before["at_s"] for before, after in pairwise(in_order)]
    cpu_s = cpu.at(in_order[-1]["at_s"]) - cpu.at(in_order[half]["at_s"])
    metrics: list[dict[str, Any]] = [record["metrics"] for record in in_order]
    started_s = next(record["at_s"] for record in records if record["kind"] == "start")
    summary = json.loads(folder.summary_path.read_text())
    return Result(
        cell=cell,
        points=tuple(points),
        seconds_per_step=statistics.median(durations[half:]),
        cpu_s_per_step=cpu_s / (len(in_order) - 1 - half),
        num_generated=summary["rollouts_generated"],
        response_tokens_mean=sum(m["num_tokens"] for m in metrics) / sum(m["num_rollouts"] for m in metrics),
        starts={
            "trainer_start": begin_s - started_s,
            "first_batch": begin_s - (in_order[0]["at_s"] - metrics[0]["step_s"]),
        },
        versions={
            "tba": __version__,
            "policy_age_mean": f"{statistics.mean(m['policy_age_mean'] for m in metrics):.1f}",
        },
        at_s=time.time(),
    )


def first_engine_ready_s(logs: Path) -> float:
    """Return when the first searcher had its weights in its engine: its first lease follows at once."""
    found: list[float] = []
    for path in logs.glob("searcher-*.log"):
        for line in path.read_text().splitlines():
            if " engine ready " in line:
                found.append(datetime.fromisoformat(line.partition(" ")[0]).timestamp())
    if not found:
        raise SystemExit(f"error: no searcher in {logs} says when its engine was ready")
    return min(found)
