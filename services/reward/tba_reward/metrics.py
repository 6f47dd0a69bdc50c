"""The Prometheus metrics of the reward service."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tba_reward.scorer import Failure, Outcome

_BUCKETS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one service, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._verifications = Counter(
            "tba_reward_verifications",
            "Completions by task and result: scored, or the reason of the error",
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
            "Items that a scorer was asked for, by result: scored, or the reason of the failure",
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
        self.cache_hits = Counter(
            "tba_reward_cache_hits", "Items whose score was known, or that came twice in a request", registry=registry
        )
        self.pending = Gauge("tba_reward_pending", "Completions in work or waiting for a scorer", registry=registry)
        self.worker_losses = Counter(
            "tba_reward_worker_losses",
            "Worker processes that were killed at a deadline or died, and were replaced",
            ["cause"],
            registry=registry,
        )

    def record_results(self, task: str, results: Sequence[str], elapsed_s: float | None = None) -> None:
        """Count a task's results in one request; `elapsed_s` is None if the items were refused without scoring."""
        # one increment per label and not per item: a request holds up to a thousand
        for result, number in Tally(results).items():
            self._verifications.labels(task, result).inc(number)
        if elapsed_s is not None:
            self._seconds.labels(task).observe(elapsed_s)

    def record_outcomes(self, task: str, scorer: str, outcomes: Sequence[Outcome], elapsed_s: float) -> None:
        """Count a scorer's outcomes in one request, by result, and record the seconds that they took."""
        results = [outcome.reason if isinstance(outcome, Failure) else "scored" for outcome in outcomes]
        for result, number in Tally(results).items():
            self._scores.labels(task, scorer, result).inc(number)
        self._scorer_seconds.labels(task, scorer).observe(elapsed_s)
