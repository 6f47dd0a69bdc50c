"""Hundreds of searchers on one machine: simulated engines, everything else real, joins, leaves and preemptions.

The searchers are the service's own code, many to a process; they sample from the real buffer (over a real Redis with
`appendfsync always`), score with the real reward service and pull versions from a store. A pretend trainer draws, acks,
publishes and asks for evaluations. Exits 1 when something was lost, doubled or left behind, or when a target is missed.

    python benchmarks/scale.py [--searchers 256] [--seconds 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.report import write_document
from benchmarks.scale_bench.plan import Plan
from benchmarks.scale_bench.searchers import run_searchers, sections
from benchmarks.scale_bench.verdict import figures, violations

MAX_PUSH_P99_MS = 1000.0
MIN_FAIRNESS = 0.9
NUM_HOSTS, NUM_SLOTS = 2, 4
"""Processes that the searchers share; slots of each searcher."""


def main() -> int:
    """Run the searchers and print the findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--searchers", type=int, default=256, help="searchers at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they work, before all drain")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    plan = Plan(num_searchers=args.searchers, duration_s=args.seconds)
    folder = Path(tempfile.mkdtemp(prefix="tba-scale-"))
    try:
        evidence = run_searchers(folder, plan, num_hosts=NUM_HOSTS, recipe=sections(num_slots=NUM_SLOTS))
        wrong, numbers = violations(evidence), figures(evidence)
    finally:
        if args.keep:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if numbers["push_p99_ms"] > MAX_PUSH_P99_MS:
        wrong.append(f"push p99 is {numbers['push_p99_ms']:.0f} ms; the target is {MAX_PUSH_P99_MS:g}")
    if numbers["lease_fairness"] < MIN_FAIRNESS:
        wrong.append(f"fairness of leases is {numbers['lease_fairness']:.2f}; the target is {MIN_FAIRNESS:g}")
    print("| figure | measured |\n|---|---|")
    for name, value in numbers.items():
        print(f"| {name} | {value:,.0f} |" if abs(value) >= 100 else f"| {name} | {value:.3g} |")
    print("waits seen:", ", ".join(f"{name} {num}" for name, num in sorted(evidence.seen.waits.items())) or "none")
    for sentence in wrong:
        print(f"NOT AS IT MUST BE: {sentence}")
    write_document(args, {"figures": numbers, "waits": dict(evidence.seen.waits), "violations": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
