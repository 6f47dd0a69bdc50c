"""CPU seconds of the quickstart by process: per optimizer step, per generated and per trained rollout.

    python benchmarks/cpu_per_step.py [--first 100] [--last 300] [--runs 1] [--json FILE] [--set KEY=VALUE ...]

The recipe is run whole, with real processes. CPU seconds (user and system, of all threads and children) are read when
step `--first` is in metrics.jsonl and again at `--last`, so that starts do not count; evaluations, checkpoints and
publications in between do. Wall-clock time does not matter: the processes may share their cores with others.

`benchmarks/compare.py OTHER --bench cpu_per_step` alternates between two checkouts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.cpu_bench.processes import cpu_seconds  # noqa: E402
from benchmarks.report import write_document  # noqa: E402
from tba.clients import BufferClient  # noqa: E402
from tba.config import Recipe, load_recipe  # noqa: E402
from tba.tokens import operator_client_token  # noqa: E402

RECIPE = ROOT / "recipes" / "quickstart.toml"
RUN = "bench-cpu-per-step"
POLL_S = 0.02
DEADLINE_S = 600.0
STOP_S = 60.0
SPARE_STEPS = 20
"""The run is ended after the last reading; it must not end by itself before."""
KINDS = ("trainer", "searcher", "buffer", "reward", "redis", "other")


def measure_run(first: int, last: int, sets: Sequence[str]) -> dict[str, Any]:
    """Run the recipe; return CPU seconds by process, steps and rollouts between two steps.

    Raises:
        SystemExit: the run ended or stood still before it came to step `last`.
    """
    steps = f"trainer.num_steps={last + SPARE_STEPS}"
    command = [sys.executable, "-m", "tba_cli.main", "run", str(RECIPE), "--run-name", RUN, "--fresh", "--quiet"]
    command += [word for item in (steps, *sets) for word in ("--set", item)]
    folder = ROOT / "runs" / RUN
    shutil.rmtree(folder, ignore_errors=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        before = _reading(process, folder, first)
        after = _reading(process, folder, last)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "num_steps": after["step"] - before["step"],
        "generated": after["generated"] - before["generated"],
        "trained": after["trained"] - before["trained"],
        "wall_s": after["at_s"] - before["at_s"],
        "cpu_s": {kind: after["cpu_s"].get(kind, 0.0) - before["cpu_s"].get(kind, 0.0) for kind in KINDS},
    }


def _reading(process: subprocess.Popen[bytes], folder: Path, step: int) -> dict[str, Any]:
    """Wait for a step; return CPU seconds and counts as of then."""
    deadline = time.monotonic() + DEADLINE_S
    while _last_step(folder / "metrics.jsonl") < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"error: the run did not come to step {step}; see {folder}/logs")
        time.sleep(POLL_S)
    seconds, reached = cpu_seconds(process.pid), _last_step(folder / "metrics.jsonl")
    endpoints = json.loads((folder / "endpoints.json").read_text())
    client = BufferClient(endpoints["buffer_url"], token=operator_client_token(endpoints["tokens_file"]))
    try:
        stats = client.stats()
    finally:
        client.close()
    return {
        "step": reached,
        "cpu_s": seconds,
        "generated": stats.rollouts_generated,
        "trained": stats.rollouts_trained,
        "at_s": time.monotonic(),
    }


def _last_step(path: Path) -> int:
    """Return the newest whole step of metrics.jsonl, 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    # evaluations arrive late, under the step of their version
    steps = [json.loads(line) for line in lines if line.startswith(b'{"kind": "step"')]
    return int(steps[-1]["step"]) if steps else 0


def summarise(runs: Sequence[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """Return medians over the runs."""
    num_trained = recipe.sampling.prompts_per_batch * recipe.sampling.group_size

    def per(what: str, kind: str) -> float:
        return statistics.median(run["cpu_s"][kind] / max(1, run[what]) for run in runs)

    per_step = {kind: per("num_steps", kind) for kind in KINDS}
    per_generated = {kind: per("generated", kind) for kind in ("searcher", "reward")}
    total = statistics.median(sum(run["cpu_s"].values()) / run["num_steps"] for run in runs)
    return {
        "per_step_cpu_s": {**per_step, "total": total},
        "per_generated_rollout_cpu_s": per_generated,
        "per_trained_rollout_cpu_s": {kind: value / num_trained for kind, value in per_step.items()},
        "generated_per_trained": statistics.median(run["generated"] / run["trained"] for run in runs),
    }


def report(summary: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':10} {'ms/step':>9} {'us/trained':>11}")
    for kind, seconds in summary["per_step_cpu_s"].items():
        trained = summary["per_trained_rollout_cpu_s"].get(kind)
        print(f"{kind:10} {1e3 * seconds:9.1f} {'' if trained is None else f'{1e6 * trained:11.0f}'}")
    for kind, seconds in summary["per_generated_rollout_cpu_s"].items():
        print(f"{kind}: {1e6 * seconds:.0f} us per generated rollout")
    print(f"generated per trained rollout: {summary['generated_per_trained']:.2f}")


def main() -> None:
    """Measure, print the table, and write it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=100, help="step of the first reading")
    parser.add_argument("--last", type=int, default=300, help="step of the second reading")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `tba run`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = [measure_run(args.first, args.last, args.set) for _ in range(args.runs)]
    summary = summarise(runs, load_recipe(str(RECIPE), sets=args.set))
    report(summary)
    write_document(args, {**summary, "runs": runs})


if __name__ == "__main__":
    main()
