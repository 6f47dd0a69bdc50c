"""The pool of worker processes beside pebble's, in one run (docs/adr/0012): both fork from a server that has preloaded.

    pip install --target /tmp/pebble pebble==5.2.3
    PYTHONPATH=.:services/reward:/tmp/pebble python -m benchmarks.reward_bench [--repetitions 3]

Both have 2 workers, the same rules, items and deadlines, and the same modules preloaded (sympy, math-verify, warm). In
each repetition every figure is measured for one pool and at once for the other:

    trivial     items per second of a rule that does nothing; pebble: one item per message, as a deadline per item needs
    hung, all   seconds until every item has a score or an error; the first two hang
    hung, kills seconds until both hung items are given up: at 1 s of CPU time (own), at 1 s by the clock (pebble)
    hung, rest  seconds from then on: new workers are forked, and the good items that are left are scored

Then, once for each: whether a killed worker's child is gone, and what becomes of an item that exhausts the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Protocol

import uvloop
from tba_reward.process_pool.job import WorkerRule
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Failure, Item, Outcome, Rule, outcome_of

from benchmarks.reward_bench import pool_rules
from benchmarks.reward_bench.answers import maths

NUM_WORKERS = 2
NUM_TRIVIAL, NUM_MATHS, NUM_HUNG = 4000, 200, 2
DEADLINE_S, LONG_S = 1.0, 60.0
MEMORY_BYTES = 4 << 30
MODULE = pool_rules.__name__


class Pool(Protocol):
    """One of the two pools."""

    name: str

    def score(self, rule: Rule, items: Sequence[Item], timeout_s: float) -> tuple[list[Outcome], list[float]]:
        """Return an outcome per item, and the seconds after which each was known."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class OwnPool:
    """tba_reward.process_pool, on the event loop that the service has."""

    name = "own"

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._pool = self._runner.run(self._start())

    def score(self, rule: Rule, items: Sequence[Item], timeout_s: float) -> tuple[list[Outcome], list[float]]:
        """See `Pool`; all items in one request."""
        return self._runner.run(self._score(_worker_rule(rule), items, timeout_s))

    def close(self) -> None:
        """See `Pool`."""
        self._runner.run(self._pool.close())
        self._runner.close()

    async def _start(self) -> WorkerPool:
        pool = WorkerPool(num_workers=NUM_WORKERS, max_memory_bytes=MEMORY_BYTES, start_timeout_s=LONG_S)
        await pool.start()
        for rule in (pool_rules.trivial, pool_rules.maths_or_hang):
            await pool.prepare(_worker_rule(rule))
        return pool

    async def _score(
        self, rule: WorkerRule, items: Sequence[Item], timeout_s: float
    ) -> tuple[list[Outcome], list[float]]:
        start_s = time.perf_counter()
        times_s = [0.0] * len(items)

        async def score_one(at: int) -> Outcome:
            (outcome,) = await self._pool.score(rule, [items[at]], timeout_s)
            times_s[at] = time.perf_counter() - start_s
            return outcome

        if len(items) > NUM_MATHS + NUM_HUNG:  # only the total counts: one request, as the service makes it
            outcomes = await self._pool.score(rule, items, timeout_s)
            return outcomes, [time.perf_counter() - start_s] * len(items)
        return await asyncio.gather(*(score_one(at) for at in range(len(items)))), times_s


class PebblePool:
    """pebble with the start method `forkserver` and the same module preloaded; its initializer bounds the memory."""

    name = "pebble"

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([MODULE])
        pebble = importlib.import_module("pebble")  # no dependency of the project
        self._pool = pebble.ProcessPool(max_workers=NUM_WORKERS, context=context, initializer=_bound_memory)

    def score(self, rule: Rule, items: Sequence[Item], timeout_s: float) -> tuple[list[Outcome], list[float]]:
        """See `Pool`."""
        start_s = time.perf_counter()
        times_s = [0.0] * len(items)

        def done(at: int, future: Future[Outcome]) -> None:
            times_s[at] = time.perf_counter() - start_s

        futures: list[Any] = []
        for at, item in enumerate(items):
            future = self._pool.schedule(outcome_of, args=[rule, item, pool_rules.MATH_PARAMS], timeout=timeout_s)
            future.add_done_callback(functools.partial(done, at))
            futures.append(future)
        wait(futures)
        return [_pebble_outcome(future) for future in futures], times_s

    def close(self) -> None:
        """See `Pool`."""
        self._pool.stop()
        self._pool.join()


def main() -> int:
    """Measure and print; skip with a sentence where pebble is not installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each figure and pool")
    args = parser.parse_args()
    if importlib.util.find_spec("pebble") is None:
        print("skipped: pebble is not installed; pip install --target FOLDER pebble==5.2.3, and add it to PYTHONPATH")
        return 0
    pools: list[Pool] = [OwnPool(), PebblePool()]
    try:
        for pool in pools:  # both have started their workers
            pool.score(pool_rules.maths_or_hang, _maths(32, seed=0), LONG_S)
        found: dict[str, dict[str, list[float]]] = {}
        for repetition in range(args.repetitions):
            for figure in (_trivial, _hung):
                for pool in pools if repetition % 2 == 0 else pools[::-1]:
                    for name, value in figure(pool, repetition).items():
                        found.setdefault(name, {}).setdefault(pool.name, []).append(value)
        _print(found)
        for pool in pools:
            print(f"{pool.name}: {_child_of_killed_worker(pool)}; {_out_of_memory(pool)}")
    finally:
        for pool in pools:
            pool.close()
    return 0


def _trivial(pool: Pool, repetition: int) -> dict[str, float]:
    items = [Item(prompt="", response=f"a{repetition}-{number}") for number in range(NUM_TRIVIAL)]
    start_s = time.perf_counter()
    outcomes, _ = pool.score(pool_rules.trivial, items, DEADLINE_S)
    elapsed_s = time.perf_counter() - start_s
    assert outcomes == [1.0] * NUM_TRIVIAL
    return {"trivial, items/s": NUM_TRIVIAL / elapsed_s}


def _hung(pool: Pool, repetition: int) -> dict[str, float]:
    hung = [Item(prompt="", response="", data={"hang": True, "answer": "1"})] * NUM_HUNG
    outcomes, times_s = pool.score(
        pool_rules.maths_or_hang, [*hung, *_maths(NUM_MATHS, seed=1 + repetition)], DEADLINE_S
    )
    assert all(isinstance(outcome, Failure) for outcome in outcomes[:NUM_HUNG]), outcomes[:NUM_HUNG]
    known = sum(not isinstance(outcome, Failure) for outcome in outcomes)
    assert known == NUM_MATHS, f"{pool.name} scored {known} of {NUM_MATHS} good items"
    killed_s = max(times_s[:NUM_HUNG])
    return {"hung, all, s": max(times_s), "hung, kills, s": killed_s, "hung, rest, s": max(times_s) - killed_s}


def _child_of_killed_worker(pool: Pool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pid"
        item = Item(prompt="", response="", data={"pid_file": str(path)})
        pool.score(pool_rules.hang_with_child, [item], DEADLINE_S)
        pid = int(path.read_text())
    time.sleep(1.0)
    try:
        is_gone = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        is_gone = True
    if not is_gone:
        os.kill(pid, 9)
    return f"the child of a killed worker {'is gone' if is_gone else 'still runs'}"


def _out_of_memory(pool: Pool) -> str:
    (outcome,), _ = pool.score(pool_rules.exhaust_memory, [Item(prompt="", response="")], LONG_S)
    return f"an item that exhausts the memory: {outcome.reason if isinstance(outcome, Failure) else outcome}"


def _print(found: dict[str, dict[str, list[float]]]) -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    print("| figure | own | pebble | own / pebble, medians |")
    print("|---|---|---|---|")
    for name, by_pool in found.items():
        own, other = by_pool["own"], by_pool["pebble"]
        ratio = statistics.median(own) / statistics.median(other)
        cells = [" ".join(f"{value:.4g}" for value in values) for values in (own, other)]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f} |")


def _maths(number: int, *, seed: int) -> list[Item]:
    return [Item(prompt=each.prompt, response=each.response, data=each.data) for each in maths(number, seed=seed)]


def _worker_rule(rule: Rule) -> WorkerRule:
    return WorkerRule(function=f"{MODULE}:{rule.__name__}", params=pool_rules.MATH_PARAMS, preload=True)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _pebble_outcome(future: Any) -> Outcome:
    error = future.exception()
    return future.result() if error is None else Failure("timeout", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
