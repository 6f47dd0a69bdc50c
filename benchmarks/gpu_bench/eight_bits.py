"""vLLM with weights, keys and values in 8 bits, of a small llama that is trained here first (benchmarks/fp8.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from tba_trainer.checkpoints.canary import EIGHT_BIT_TOLERANCE, MIN_TOLERANCE

from benchmarks.canary_bench.models import KINDS, make_model
from benchmarks.fp8 import SETTINGS
from benchmarks.gpu_bench.check import Bench, Findings
from benchmarks.gpu_bench.vllm_engine import need_vllm

FP8 = Path(__file__).resolve().parents[1] / "fp8.py"
CHOSEN = tuple(name for name in SETTINGS if "e5m2" not in name)
MOST_S = 165
"""Of the whole check: less than its deadline in checks.py, so that findings stay."""


def check_vllm_fp8(bench: Bench, found: Findings) -> None:
    """Train a small llama, and compare log-probs and canaries for each kind of 8 bits, and for 16 bits.

    Random weights would say little: they round twenty times as much as trained ones. All settings start at once.
    """
    need_vllm(bench)
    end = perf_counter() + MOST_S
    folder = bench.folder / "model"
    make_model(folder, KINDS["trained llama"], max_steps=2 if bench.quick else None)
    sizes = ("--responses", "4", "--tokens", "4", "--canaries", "2") if bench.quick else ("--canaries", "8")
    settings = ("keys and values e4m3",) if bench.quick else CHOSEN
    paths = {name: bench.folder / f"{name.replace(' ', '_').replace(',', '')}.json" for name in settings}
    command = [sys.executable, str(FP8), "--device", bench.device, "--model", str(folder), "--wrong", "0", *sizes]
    processes = dict[str, subprocess.Popen[bytes]]()
    try:
        for name, path in paths.items():
            processes[name] = subprocess.Popen([*command, "--settings", name, "--json", str(path)])
        for name, process in processes.items():
            try:
                code = process.wait(max(0.0, end - perf_counter()))
            except subprocess.TimeoutExpired:
                found.fail(f"{name}: not done after {MOST_S} s")
                continue
            if code:
                found.fail(f"{name}: its process ended with code {code}")
                continue
            _note(paths[name].stem, name, json.loads(paths[name].read_text())["rows"][name], found)
    finally:
        for process in processes.values():  # an engine that is left has a share of the card
            process.kill()


def _note(key: str, name: str, row: dict[str, Any], found: Findings) -> None:
    if "refused" in row:
        found.fail(f"{name}: {row['refused']}")
        return
    limit = EIGHT_BIT_TOLERANCE if SETTINGS[name] else MIN_TOLERANCE["bfloat16"]
    found.at_most(f"{key}_mean_gap_nats", row["mean_gap"], limit / 2)
    found.note(f"{key}_max_gap_nats", row["max_gap"])
    found.note(f"{key}_ess_of_responses", row["ess_of_responses"])
    found.note(f"{key}_pause_ms", row["pause_ms"])
    for canary in ("canary", "canary_after_update"):
        found.at_most(f"{key}_{canary}_gap_nats", max(row[canary]), limit)
