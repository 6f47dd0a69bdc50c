"""The trainer's step: tokens per second beside the plain way, peak memory of log-probs, on CUDA also MFU.

    python benchmarks/trainer.py [--json FILE] [--rounds 5] [--skip-memory]
    python benchmarks/trainer.py --device cuda --dtype bfloat16 --size 1.5b --longest 8192 --micro-batch-tokens 32768

A step is: forward and backward passes of a batch with the GRPO objective (no reference), clip, AdamW. Ways alternate in
one process, after one step each to warm up; every way must find the same gradient norm. On the CPU it is one thread,
and time is the CPU time of the process, so that other work on the machine slows down no way more than another. Tokens
are prompt and response tokens without padding.
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
from benchmarks.trainer_bench import memory  # noqa: E402
from benchmarks.trainer_bench.ways import Step, ours, plain  # noqa: E402
from benchmarks.trainer_bench.workload import SIZES, Spread, Workload, make_model, make_rollouts  # noqa: E402

MIN_MFU = 0.4
NORM_TOLERANCE = {"cpu": 1e-3, "cuda": 0.1}
"""Relative; in bfloat16 the ways round differently."""
PEAK_TFLOPS = 989.0
"""Dense bfloat16 of one H100 or H200."""


def timed(step: Step, device: str) -> tuple[float, float]:
    """Seconds and gradient norm of one step."""
    if device == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        norm = step()
        torch.cuda.synchronize()
        return time.perf_counter() - start, norm
    start = time.process_time()
    norm = step()
    return time.process_time() - start, norm


def compare(work: Workload, ways: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Tokens per second of every way, and how many times as fast ours is, median over rounds of alternating steps.

    Raises:
        SystemExit: two ways do not compute the same gradient.
    """
    norms = {name: timed(step, work.device)[1] for name, step in ways.items()}  # the first steps have equal weights
    for name, norm in norms.items():
        if abs(norm - norms["ours"]) > NORM_TOLERANCE[work.device] * norms["ours"]:
            raise SystemExit(f"the ways do not compute the same: gradient norms {norms}, see {name}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            seconds[name].append(timed(step, work.device)[0])
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
    model = make_model(args.size, args.device)
    rollouts, rewards = make_rollouts(
        args.groups, args.group_size, args.longest, spread=spread, vocab_size=SIZES[args.size][-1]
    )
    work = Workload(
        model=model,
        rollouts=rollouts,
        rewards=rewards,
        micro_batch_tokens=args.micro_batch_tokens,
        device=args.device,
        autocast_dtype=torch.bfloat16 if args.dtype == "bfloat16" else None,
    )
    ways = {"ours": ours(work)}
    if not args.ours_only:
        ways["plain"] = plain(work)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result = compare(work, ways, args.rounds)
    if args.device == "cuda":
        result["mfu_of_ours"] = round(mfu(work, statistics.median(result["seconds"]["ours"]), args.peak_tflops), 3)
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return result


def mfu(work: Workload, seconds: float, peak_tflops: float) -> float:
    """Share of the device's peak: 6 flops per parameter of a matrix product and token, and causal attention.

    The head counts where a response token is predicted; what is computed again does not count.
    """
    config = work.model.config
    head = config.vocab_size * config.hidden_size
    inner = sum(p.numel() for p in work.model.base_model.parameters()) - head
    num_response = sum(len(r.response_tokens) for r in work.rollouts)
    squares = sum((len(r.prompt_tokens) + len(r.response_tokens)) ** 2 for r in work.rollouts)
    attention = 6 * config.num_hidden_layers * config.hidden_size * squares
    return (6 * (inner * work.num_tokens + head * num_response) + attention) / seconds / (peak_tflops * 1e12)


def report(document: dict[str, Any]) -> None:
    """Print the tables."""
    for spread, result in document["steps"].items():
        rates = ", ".join(f"{name} {rate}" for name, rate in result["tokens_per_s"].items())
        ratios = ", ".join(f"{ratio} x {name}" for name, ratio in result["ratio_of_ours"].items())
        print(f"lengths 1:16 {spread}, {result['num_tokens']} tokens: tokens/s {rates}; ours is {ratios}")
        if "mfu_of_ours" in result:
            print(f"  MFU {result['mfu_of_ours']} (aim {MIN_MFU} at 1.5b), peak {result['peak_gib']} GiB")
    for way, result in document.get("memory", {}).items():
        peak, logits = result["peak_bytes_above_model"] / 1e6, result["all_logits_bytes"] / 1e6
        print(f"log-probs, {way}, {result['num_tokens']} tokens: peak {peak:.0f} MB above the model", end="; ")
        print(f"the logits alone would be {logits:.0f} MB")


def main() -> None:
    """Measure what the arguments ask for, print it, and write it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest rollout")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spread", choices=get_args(Spread), nargs="+", default=list(get_args(Spread)))
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--skip-memory", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.device == "cpu" else torch.get_num_threads())
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "steps": {spread: steps(args, spread) for spread in args.spread},
    }
    if args.device == "cpu" and not args.skip_memory:
        # the plain way at 8192 tokens would take some 15 GB
        document["memory"] = {"ours": memory.measured("ours", 8192), "plain": memory.measured("plain", 512)}
    report(document)
    write_document(args, document)


if __name__ == "__main__":
    main()
