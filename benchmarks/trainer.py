"""The trainer's step on the CPU: tokens per second beside the plain way.

    python benchmarks/trainer.py [--json FILE] [--rounds 5] [--ours-only]

A step is: forward and backward passes of a batch with the GRPO objective (no reference), clip, AdamW. Ways alternate in
one process, after one step each to warm up; every way must find the same gradient norm. It is one thread, and time is
the CPU time of the process, so that other work on the machine slows down no way more than another. Tokens are prompt
and response tokens without padding. On a GPU: `benchmarks/gpu.py bench --only throughput`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "trainer")]

import torch  # noqa: E402

from benchmarks.report import write_document  # noqa: E402
from benchmarks.trainer_bench.ways import Step, ours, plain  # noqa: E402
from benchmarks.trainer_bench.workload import VOCAB_SIZE, Spread, Workload, make_model, make_rollouts  # noqa: E402

NORM_TOLERANCE = 1e-3
"""Relative."""
NUM_GROUPS, GROUP_SIZE, LONGEST, MICRO_BATCH_TOKENS = 8, 8, 256, 2048


def timed(step: Step) -> tuple[float, float]:
    """CPU seconds and gradient norm of one step."""
    start = time.process_time()
    norm = step()
    return time.process_time() - start, norm


def compare(work: Workload, ways: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Tokens per second of every way, and how many times as fast ours is, median over rounds of alternating steps.

    Raises:
        SystemExit: two ways do not compute the same gradient.
    """
    norms = {name: timed(step)[1] for name, step in ways.items()}  # the first steps have equal weights
    for name, norm in norms.items():
        if abs(norm - norms["ours"]) > NORM_TOLERANCE * norms["ours"]:
            raise SystemExit(f"the ways do not compute the same: gradient norms {norms}, see {name}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            seconds[name].append(timed(step)[0])
    return {
        "tokens_per_s": {name: round(work.num_tokens / statistics.median(s)) for name, s in seconds.items()},
        "ratio_of_ours": {
            name: round(statistics.median(a / b for a, b in zip(s, seconds["ours"], strict=True)), 2)
            for name, s in seconds.items()
            if name != "ours"
        },
        "gradient_norm": norms,
        "num_tokens": work.num_tokens,
        "seconds": seconds,
    }


def steps(args: argparse.Namespace, spread: Spread) -> dict[str, Any]:
    """Every way with one distribution of lengths."""
    rollouts, rewards = make_rollouts(NUM_GROUPS, GROUP_SIZE, LONGEST, spread=spread, vocab_size=VOCAB_SIZE)
    work = Workload(model=make_model(), rollouts=rollouts, rewards=rewards, micro_batch_tokens=MICRO_BATCH_TOKENS)
    ways = {"ours": ours(work)}
    if not args.ours_only:
        ways["plain"] = plain(work)
    return compare(work, ways, args.rounds)


def main() -> None:
    """Measure what the arguments ask for, print it, and write it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    document = {"torch": torch.__version__, "steps": {spread: steps(args, spread) for spread in get_args(Spread)}}
    for spread, result in document["steps"].items():
        rates = ", ".join(f"{name} {rate}" for name, rate in result["tokens_per_s"].items())
        ratios = ", ".join(f"{ratio} x {name}" for name, ratio in result["ratio_of_ours"].items())
        print(f"lengths 1:16 {spread}, {result['num_tokens']} tokens: tokens/s {rates}; ours is {ratios}")
    write_document(args, document)


if __name__ == "__main__":
    main()
