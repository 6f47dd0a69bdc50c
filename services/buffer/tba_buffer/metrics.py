"""What GET /metrics shows. Counters count what this process has seen; GET /v1/stats has the counts of the whole run."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tba.api import PushOutcome, Stats
from tba.versions import PolicyVersion

AGE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of this process.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rollouts = Counter(
            "tba_rollouts", "Rollouts pushed, by outcome", ["service", "outcome"], registry=registry
        )
        self._dropped = Counter(
            "tba_buffer_dropped", "Rollouts refused or evicted, by reason", ["reason"], registry=registry
        )
        self._stored = Gauge("tba_buffer_rollouts", "Rollouts stored, by reward status", ["status"], registry=registry)
        self._payload = Gauge("tba_buffer_payload_bytes", "Bytes of the stored rollouts", registry=registry)
        self._leases = Gauge("tba_buffer_open_leases", "Leases that have not ended", registry=registry)
        self._version = Gauge(
            "tba_weight_version", "Optimizer step of the newest announced version", ["role"], registry=registry
        )
        self._ages = Histogram(
            "tba_policy_age_steps",
            "Policy age of rollouts when a step consumed them",
            buckets=AGE_BUCKETS,
            registry=registry,
        )
        self._batches = Counter("tba_buffer_batches", "Batches, by what became of them", ["event"], registry=registry)
        self._slots = Counter("tba_buffer_slots", "Slots of drawn batches, by kind", ["kind"], registry=registry)
        self._evicted_before: int | None = None

    def pushed(self, outcomes: Sequence[PushOutcome]) -> None:
        """One push."""
        for outcome in outcomes:
            self._rollouts.labels(service="buffer", outcome=outcome.outcome).inc()
            if outcome.reason is not None:
                self._dropped.labels(reason=outcome.reason.split(":")[0]).inc()

    def drawn(self, slots: dict[str, int]) -> None:
        """One drawn batch; a batch that is answered again has no slots and counts nothing."""
        if not slots:
            return
        self._batches.labels(event="drawn").inc()
        for kind in ("recent", "replay", "fallback"):
            self._slots.labels(kind=kind).inc(slots[kind])

    def acked(self, policy_ages: Sequence[int]) -> None:
        """One acked batch."""
        self._batches.labels(event="acked").inc()
        for age in policy_ages:
            self._ages.observe(age)

    def level(self, stats: Stats, latest_version: str | None) -> None:
        """The gauges, and what was evicted since the last call."""
        self._stored.labels(status="scored").set(stats.num_scored)
        self._stored.labels(status="pending").set(stats.num_pending)
        self._stored.labels(status="failed").set(stats.num_failed)
        self._payload.set(stats.payload_bytes)
        self._leases.set(stats.leases["open"])
        if latest_version is not None:
            self._version.labels(role="buffer").set(PolicyVersion.parse(latest_version).step)
        evicted = stats.evicted.get("max_rollouts", 0)
        if self._evicted_before is not None:
            self._dropped.labels(reason="max_rollouts").inc(max(0, evicted - self._evicted_before))
        self._evicted_before = evicted
