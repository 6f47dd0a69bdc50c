"""Whole runs by `tba run`, with trainer and searcher on the device."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.check import Bench, Findings, Skipped

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
NUM_STEPS = 150
MIN_GAIN = 0.1
"""Of the mean reward, from the first tenth of the steps to the last: the quickstart gains 0.3 or more."""
VLLM_SHARE = 0.3
"""Of the card's memory; the trainer, and the searcher's own small tensors, have the rest."""
LAST_CHARS, LOG_CHARS = 160, 3000


def check_quickstart(bench: Bench, found: Findings) -> None:
    """Train the quickstart for some steps, in bfloat16 where there is a GPU; its reward has to rise."""
    if bench.device == "cpu" and not bench.measures:
        raise Skipped("on a CPU this is `make demo`")
    _check_quickstart(bench, found, [])


def check_quickstart_vllm(bench: Bench, found: Findings) -> None:
    """Train the quickstart with vLLM, which shares the card with the trainer: updates enter a running engine."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    if bench.device == "cpu":
        raise Skipped("vLLM on the CPU takes wider heads than the quickstart's; the suite runs it (tests/e2e)")
    _check_quickstart(bench, found, ["searcher.engine=vllm", f"searcher.vllm.gpu_memory_share={VLLM_SHARE}"])


def _check_quickstart(bench: Bench, found: Findings, more: Sequence[str]) -> None:
    sets = [f"trainer.num_steps={NUM_STEPS}", f"eval.every_steps={NUM_STEPS}", "eval.num_prompts_final=128", *more]
    if bench.device == "cuda":
        sets.append("trainer.compute_dtype=bfloat16")
    records = _run(bench, found, RECIPES / "quickstart.toml", sets)
    rewards = _column(records, "reward_mean")
    tenth = max(1, len(rewards) // 10)
    gain = statistics.mean(rewards[-tenth:]) - statistics.mean(rewards[:tenth])
    found.at_least("reward_gain", gain, MIN_GAIN)


def _run(bench: Bench, found: Findings, recipe: Path, sets: Sequence[str]) -> list[dict[str, Any]]:
    """Run a recipe; note its curve and speed; return its records."""
    try:
        from tba_cli.redis_server import find_redis_server

        find_redis_server()
    except Exception as error:
        raise Skipped(f"no Redis here: {error}") from None
    devices = [f"{part}.device={bench.device}" for part in ("trainer", "searcher")]
    options = [option for each in (*devices, *sets) for option in ("--set", each)]
    command = [sys.executable, "-m", "tba_cli.main", "run", str(recipe), "--run-name", "gpu", *options]
    with subprocess.Popen(
        command, cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            found.note("last_line", line.strip()[:LAST_CHARS])  # where a run that is killed has been
    run = bench.folder / "runs" / "gpu"
    if process.returncode != 0:
        for log in sorted(run.glob("logs/*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-LOG_CHARS:]}")
        found.fail(f"`tba run` ended with {process.returncode}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward_mean", "loss", "grad_norm", "logprob_gap_on_policy", "step_s", "wait_s"):
        if values := _column(records, name):
            tenth = max(1, len(values) // 10)
            found.note(f"{name}_first_tenth", statistics.mean(values[:tenth]))
            found.note(f"{name}_last_tenth", statistics.mean(values[-tenth:]))
    evaluations = [record["metrics"].get("accuracy") for record in records if record["kind"] == "evaluation"]
    found.note("accuracies", ", ".join(f"{value:.3f}" for value in evaluations if value is not None))
    summary = json.loads(path.read_text()) if (path := run / "summary.json").is_file() else {}
    for name in ("state", "steps", "train_s", "first_step_s", "trainer_wait_share", "rollouts_trained"):
        if summary.get(name) is not None:
            found.note(name, summary[name])
    return records


def _column(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = (record["metrics"].get(name) for record in records if record["kind"] == "step")
    return [value for value in values if value is not None]
