"""Measure the speed of the reward service over HTTP, as searchers use it; exit 1 when a target is missed.

    python benchmarks/reward.py [--json FILE] [--items 4000]

The real service with 2 worker processes, requests of 64 items one after another from each of 2 clients, items that are
all different (nothing comes from the cache):

    maths       ordinary answers, kind `math` (math-verify): items/s with 2 workers
    poison      one item of 64 hangs: what its batch, and a batch beside it, take beyond the deadline
    overhead    what an item costs beyond its rule: `addition` (inline) and a trivial pattern (in a worker)

About a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.report import Target, judged, write_document
from benchmarks.reward_bench.answers import additions, maths
from benchmarks.reward_bench.service import ITEM_TIMEOUT_S, NUM_WORKERS, POISONED_TEXT, reward_service
from tba.api import ScoreItem, ScoreResult
from tba.clients import RewardClient

BATCH_ITEMS = 64
NUM_ROUNDS = 30
SPARE_S = 8.0
"""By then the next spare worker has imported sympy. A second kill before that waits for it (docs/rewards.md)."""
Figures = dict[str, float]


TARGETS = (
    Target("maths, ordinary answers, 2 workers", "maths_per_s", 500, unit="items/s"),
    Target(
        "a poisoned batch, beyond deadline and clean batch",
        "poison_extra_s",
        0.25,
        at_least=False,
        unit="s",
    ),
    Target("a batch beside it, beyond a clean batch on one worker", "beside_extra_s", 0.25, at_least=False, unit="s"),
    Target("overhead per item, inline", "inline_ms_per_item", 1.0, at_least=False, unit="ms"),
    Target("overhead per item, in a worker", "worker_ms_per_item", 1.0, at_least=False, unit="ms"),
)


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--items", type=int, default=4000, help="maths items")
    args = parser.parse_args()
    with reward_service() as client:
        score(client, maths(256, seed=0))  # sympy loads modules on first use
        figures = {**maths_speed(client, args.items), **poison(client), **overhead(client)}
    lines, missed = judged(figures, TARGETS)
    print("\n".join(lines))
    print(f"maths: {figures['maths_known_share']:.1%} of the scores known, {figures['maths_right_share']:.1%} right")
    write_document(args, figures)
    return 1 if missed else 0


def maths_speed(client: RewardClient, num_items: int) -> Figures:
    """Items per second, and how many scores were known."""
    items = maths(num_items, seed=1)
    start_s = time.perf_counter()
    results = score(client, items)
    elapsed_s = time.perf_counter() - start_s
    num_known = sum(result.reward is not None for result in results)
    share_right = sum(result.reward == 1.0 for result in results) / len(results)
    return {
        "maths_per_s": num_items / elapsed_s,
        "maths_known_share": num_known / num_items,
        "maths_right_share": share_right,
    }


def poison(client: RewardClient) -> Figures:
    """Measure the extra time that a batch with a poisoned item takes, and that of a batch beside it."""
    clean_s = statistics.median(timed(client, maths(BATCH_ITEMS, seed=100 + n)) for n in range(5))
    extra_s, beside_s = [], []
    for number in range(3):
        time.sleep(SPARE_S)
        poisoned = maths(BATCH_ITEMS, seed=200 + number)
        poisoned[0] = ScoreItem(item_id="poison", task="poison", prompt="", response=POISONED_TEXT)
        beside = maths(BATCH_ITEMS, seed=300 + number)
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(timed, client, poisoned)
            second = threads.submit(timed, client, beside)
            extra_s.append(first.result() - ITEM_TIMEOUT_S - clean_s)
            # both batches share the one worker that is left
            beside_s.append(second.result() - 2 * NUM_WORKERS * clean_s)
    return {"clean_batch_s": clean_s, "poison_extra_s": max(extra_s), "beside_extra_s": max(beside_s)}


def overhead(client: RewardClient) -> Figures:
    """Milliseconds per item of requests of 64 whose rules take next to nothing; everything included."""
    rounds = [range(at, at + BATCH_ITEMS) for at in range(0, NUM_ROUNDS * BATCH_ITEMS, BATCH_ITEMS)]
    # other items in every round: known scores are not asked for again
    quick = [[ScoreItem(item_id=str(n), task="quick", prompt="", response=f"a{n}") for n in each] for each in rounds]
    found = {}
    for name, batches in (("inline", [additions(BATCH_ITEMS)] * NUM_ROUNDS), ("worker", quick)):
        times_s = [timed(client, items) for items in batches]
        found[f"{name}_ms_per_item"] = statistics.median(times_s) / BATCH_ITEMS * 1000
    return found


def score(client: RewardClient, items: list[ScoreItem]) -> list[ScoreResult]:
    """Score in batches from NUM_WORKERS clients at once."""
    batches = [items[at : at + BATCH_ITEMS] for at in range(0, len(items), BATCH_ITEMS)]
    lock, results = threading.Lock(), []

    def send(batch: list[ScoreItem]) -> None:
        found = client.score(batch).results
        with lock:
            results.extend(found)

    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        list(threads.map(send, batches))
    return results


def timed(client: RewardClient, items: list[ScoreItem]) -> float:
    """Seconds of one request."""
    start_s = time.perf_counter()
    client.score(items)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    sys.exit(main())
