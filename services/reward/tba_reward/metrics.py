"""What the reward service measures."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tba_reward.scorers.base import Failure, Outcome

_BUCKETS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)


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
            "Time from taking up the items of a task in one request to their results; one observation per request",
            ["task"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._scores = Counter(
            "tba_reward_scores",
            "Items that a scorer was asked for, by what it gave: scored, or the reason of the failure",
            ["task", "scorer", "result"],
            registry=registry,
        )
        self._scorer_seconds = Histogram(
            "tba_reward_scorer_seconds",
            "Time that a scorer took over its items of one request",
            ["task", "scorer"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._hits = Counter(
            "tba_reward_cache_hits", "Items whose score was known, or that came twice in a request", registry=registry
        )
        self.pending = Gauge("tba_reward_pending", "Completions in work or waiting for a scorer", registry=registry)
        self._worker_losses = Counter(
            "tba_reward_worker_losses",
            "Worker processes that were killed at a deadline or died, and were replaced",
            ["cause"],
            registry=registry,
        )

    def done(self, task: str, results: Sequence[str], elapsed_s: float | None = None) -> None:
        """The items of a task in one request are done; without a time, they were refused at once."""
        for result, number in Tally(results).items():
            self._verifications.labels(task, result).inc(number)
        if elapsed_s is not None:
            self._seconds.labels(task).observe(elapsed_s)

    def asked(self, task: str, scorer: str, outcomes: Sequence[Outcome], elapsed_s: float) -> None:
        """A scorer has answered."""
        results = [outcome.reason if isinstance(outcome, Failure) else "scored" for outcome in outcomes]
        for result, number in Tally(results).items():
            self._scores.labels(task, scorer, result).inc(number)
        self._scorer_seconds.labels(task, scorer).observe(elapsed_s)

    def worker_lost(self, cause: str) -> None:
        """A worker process was killed at a deadline (too_slow, timeout), or died (crashed, out_of_memory)."""
        self._worker_losses.labels(cause).inc()

    def cache_hits(self, number: int) -> None:
        """So many items were not asked for."""
        self._hits.inc(number)
