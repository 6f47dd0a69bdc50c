"""What the reward service measures."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """The metrics of one service, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._verifications = Counter(
            "tba_reward_verifications",
            "Completions by task and by what became of them: scored, or the reason of the error",
            ["task", "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tba_reward_seconds",
            "Time from taking an item up to its result, waiting for a worker included",
            ["task"],
            buckets=(1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=registry,
        )
        self.pending = Gauge(
            "tba_reward_pending", "Completions in a worker process or waiting for one", registry=registry
        )

    def count(self, task: str, result: str, elapsed_s: float) -> None:
        """One item is done."""
        self._verifications.labels(task, result).inc()
        self._seconds.labels(task).observe(elapsed_s)
