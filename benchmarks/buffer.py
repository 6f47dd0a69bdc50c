"""Measure the speed of the buffer beside the same work done straight on Redis, in one run; print one table.

Everything runs on this machine: Redis with `appendfsync always`, one buffer process, client processes with the
product's own client, 64 rollouts a push, prioritised sampling. The machine is shared and noisy: the ratios count.

    python benchmarks/buffer.py [--json FILE] [--seconds 8] [--only pushes-4k ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.buffer_bench import figures
from benchmarks.buffer_bench.figures import Figure
from benchmarks.buffer_bench.index import index_alone
from benchmarks.report import Target, judged, write_document

MAX_PUSH_FALLBACK_PER_S = 25_000.0


TARGETS = (
    Target("durable pushes, 4 KB, 8 clients", "pushes-4k.http_per_s", 25_000, unit="rollouts/s"),
    Target("... share of the direct way", "pushes-4k.ratio", 0.55),
    Target("durable pushes, 16 KB, 8 clients", "pushes-16k.http_per_s", 11_000, unit="rollouts/s"),
    Target("... share of the direct way", "pushes-16k.ratio", 0.0),
    Target("fresh batches of 64, recorded, 8 clients", "batches.batches_rollouts_per_s", 60_000, unit="rollouts/s"),
    Target("... batches, share of reading payloads", "batches.ratio_batches", 0.0),
    Target("batches of 160 while pushing at half", "mixed.batches_per_s", 100, unit="batches/s"),
    Target("... draw, p99", "mixed.draw_p99_ms", 50, at_least=False, unit="ms"),
    Target("... one trainer, drawing and acking in turn", "mixed.one_trainer_batches_per_s", 0.0, unit="batches/s"),
    Target("draw of 512 of 1,000,000, groups", "index.draw_groups_ms", 1, at_least=False, unit="ms"),
    Target("draw of 512 of one prompt's 1,000,000", "index.draw_one_prompt_ms", 1, at_least=False, unit="ms"),
    Target("index memory", "index.bytes_per_rollout", 200, at_least=False, unit="bytes/rollout"),
    Target("restart with 1,000,000 rollouts", "restart.restart_s", 5, at_least=False, unit="s"),
    Target("... from a checkpoint of the log", "restart.restart_from_base_s", 5, at_least=False, unit="s"),
    Target("cost of a push, 10^6 to 10^4 stored", "restart.push_growth", 1.3, at_least=False),
    Target("cost of a draw, 10^6 to 10^4 stored", "restart.draw_growth", 1.3, at_least=False),
)


def main() -> int:
    """Measure what was asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each load runs")
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="stored rollouts of restart and growth")
    parser.add_argument("--only", nargs="*", default=[], help="names of figures; default: all")
    args = parser.parse_args()
    results: dict[str, Figure] = {}

    def max_push() -> float:
        return results.get("pushes-4k", {}).get("http_per_s", MAX_PUSH_FALLBACK_PER_S)

    stages: dict[str, Callable[[], Figure]] = {
        "pushes-4k": lambda: figures.pushes(4096, args.seconds),
        "pushes-16k": lambda: figures.pushes(16_384, args.seconds),
        "batches": lambda: figures.fresh_batches(args.seconds),
        "mixed": lambda: figures.batches_while_pushing(2 * args.seconds, max_push()),
        "index": index_alone,
        "restart": lambda: figures.restart_and_growth(args.rollouts, args.seconds / 2),
    }
    for name in args.only:
        if name not in stages:
            parser.error(f"--only {name}: no such figure; there are {', '.join(stages)}")
    for name, measure in stages.items():
        if not args.only or name in args.only:
            began_s = time.perf_counter()
            results[name] = measure()
            print(f"{name}, {time.perf_counter() - began_s:.0f} s: {results[name]}", file=sys.stderr)
    numbers = {f"{figure}.{name}": value for figure, found in results.items() for name, value in found.items()}
    print("\n".join(judged(numbers, TARGETS)[0]))
    write_document(args, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
