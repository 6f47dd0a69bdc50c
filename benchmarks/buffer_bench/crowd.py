"""Client processes that start together, work for a while, and say what they did."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
START_DEADLINE_S = 180.0


@dataclass
class Tally:
    """The counts of one client between start and end."""

    num_items: int = 0
    num_calls: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


Prepare = Callable[..., Callable[[], int]]
"""Called in the client process with its number and keyword arguments; answers the call to repeat, which answers how
many rollouts it moved."""


@dataclass
class Crowd:
    """Some client processes."""

    processes: list[Any]
    queue: Any
    start: Any

    def go(self) -> None:
        """Let them start: their `duration_s` begins now."""
        self.start.set()

    def collect(self, timeout_s: float) -> list[Tally]:
        """Return their tallies; the processes have ended then.

        Raises:
            RuntimeError: one failed.
        """
        tallies = []
        for _ in self.processes:
            try:
                tally = self.queue.get(timeout=timeout_s)
            except Empty:
                raise RuntimeError("a client process did not answer") from None
            if isinstance(tally, str):
                raise RuntimeError(f"a client process failed: {tally}")
            tallies.append(tally)
        for process in self.processes:
            process.join(timeout=30)
        return tallies


def gather(prepare: Prepare, num: int, *, duration_s: float, period_s: float = 0.0, **kwargs: Any) -> Crowd:
    """Start `num` processes and wait until all are prepared; `go` begins the work.

    Args:
        period_s: each client makes one call per period, late or not; 0: as fast as it can.
    """
    queue, start = SPAWN.Queue(), SPAWN.Event()
    ready = SPAWN.Semaphore(0)
    job = _Job(prepare, kwargs, duration_s, period_s)
    processes = [SPAWN.Process(target=_client, args=(job, number, ready, start, queue)) for number in range(num)]
    for process in processes:
        process.daemon = True
        process.start()
    for _ in processes:
        if not ready.acquire(timeout=START_DEADLINE_S):
            raise RuntimeError("a client process did not get ready")
    return Crowd(processes, queue, start)


def rate(tallies: list[Tally]) -> float:
    """Items per second of all clients together, over the span in which any of them worked."""
    span_s = max(t.ended_s for t in tallies) - min(t.began_s for t in tallies)
    return sum(t.num_items for t in tallies) / span_s


def percentile(tallies: list[Tally], share: float) -> float:
    """Latency in seconds below which `share` of all calls were."""
    latencies = sorted(latency for t in tallies for latency in t.latencies_s)
    return latencies[min(len(latencies) - 1, int(share * len(latencies)))] if latencies else float("nan")


@dataclass(frozen=True)
class _Job:
    prepare: Prepare
    kwargs: dict[str, Any]
    duration_s: float
    period_s: float


def _client(job: _Job, number: int, ready: Any, start: Any, queue: Any) -> None:
    """One process."""
    try:
        call, tally = job.prepare(number, **job.kwargs), Tally()
        ready.release()
        start.wait()
        cpu_s = time.process_time()
        tally.began_s = time.time()
        _repeat(job, number, call, tally)
        tally.ended_s = time.time()
        tally.cpu_s = time.process_time() - cpu_s
        queue.put(tally)
    except BaseException as error:  # the parent raises it
        ready.release()
        queue.put(f"{type(error).__name__}: {error}")


def _repeat(job: _Job, number: int, call: Callable[[], int], tally: Tally) -> None:
    due = tally.began_s + job.period_s * (number * 0.618034 % 1)
    while (now := time.time()) < tally.began_s + job.duration_s:
        if job.period_s and now < due:
            time.sleep(due - now)
        due += job.period_s
        before = time.perf_counter()
        num_items = call()
        tally.latencies_s.append(time.perf_counter() - before)
        tally.num_items += num_items
        tally.num_calls += 1
