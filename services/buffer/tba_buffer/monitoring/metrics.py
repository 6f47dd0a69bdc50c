"""The metrics of GET /metrics.

Counts are those of the whole run. They are read from Redis and the index when /metrics is asked, so they neither start
again with this process nor differ from GET /v1/stats. Only the times of requests belong to this process.
docs/operations.md lists the metrics; a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tba.api import ComponentInfo, RunState, WaitInfo
from tba.versions import PolicyVersion
from tba_buffer.monitoring.component_metrics import component_families, gauge_families, gauges_by
from tba_buffer.monitoring.request_times import RequestMetrics
from tba_buffer.monitoring.stats import LEASE_EVENTS, PUSH_OUTCOMES, Counters, StatsReader
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.run.components import Components
from tba_buffer.run.state import RunStateReader
from tba_buffer.sampling.draw import WAIT_SENTENCES
from tba_buffer.storage.context import RunHash

AGE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WAITS_SHOWN = 30
BATCH_WAIT = "batch"
OTHER_WAITS = "other"
DATA_WAITS = (BATCH_WAIT, *WAIT_SENTENCES)
"""The waits of a trainer for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The values behind one answer of /metrics."""

    counters: Counters
    mean_reward_recent: float | None
    components: Sequence[ComponentInfo]
    waits: Sequence[WaitInfo]
    trainer_waited_s: Mapping[str, float]
    run: RunHash
    searchers_desired: int | None


class Metrics(Collector):
    """The metrics of the run.

    Args:
        registry: where they are registered.
        stats: the counts.
        components: who is alive, and who waits.
        catalog: the prompts.
        run_state: the state of the run.
        searchers_desired: the desired number of searchers in a state of the run; None: not known here.
        durability_problem: why Redis could lose what it acknowledges, or None.
        loss: what Redis has lost of what was acknowledged, while that is not accepted.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        stats: StatsReader,
        components: Components,
        catalog: Catalog,
        run_state: RunStateReader,
        searchers_desired: Callable[[RunState], Awaitable[int | None]],
        durability_problem: Callable[[], str | None],
        loss: Callable[[], str | None],
    ) -> None:
        self._stats = stats
        self._components = components
        self._catalog = catalog
        self._run_state = run_state
        self._searchers_desired = searchers_desired
        self._durability_problem, self._loss = durability_problem, loss
        self._reading: Reading | None = None
        self._redis_answers = False
        self.times = RequestMetrics(registry)
        registry.register(self)

    async def refresh(self) -> None:
        """Read what `collect` shows.

        Raises:
            UnavailableError: Redis did not answer; `collect` shows what it had.
        """
        # until all is read: an error below leaves it false
        self._redis_answers = False
        counters = await self._stats.counters()
        detail = self._stats.detail(counters)
        infos, waits = await self._components.read()
        fields = await self._run_state.read_fields()
        self._reading = Reading(
            counters=counters,
            mean_reward_recent=detail.mean_reward_recent,
            components=infos,
            waits=waits,
            trainer_waited_s=await self._components.trainer_waits.totals(),
            run=fields,
            searchers_desired=await self._searchers_desired(fields.state),
        )
        self._redis_answers = True

    def collect(self) -> Iterator[Metric]:
        """Yield every metric but the times; before the first `refresh` only those about Redis."""
        # these two are there even without a reading: alerts need them while Redis is away
        is_durable = self._redis_answers and self._durability_problem() is None
        yield GaugeMetricFamily(
            "tba_redis_durable", "1 while Redis answers and can keep what the buffer acknowledges", value=is_durable
        )
        yield GaugeMetricFamily(
            "tba_redis_lost_data",
            "1 while Redis lacks acknowledged changes and no operator has accepted their loss",
            value=self._loss() is not None,
        )
        if self._reading is not None:
            yield from _counter_families(self._reading.counters)
            yield from _total_families(self._reading)
            yield from _gauge_families(self._reading)
            yield from _run_families(self._reading)
            yield from component_families(self._reading.components, self._reading.waits)
            yield from gauge_families(self._reading.components)
            yield from self._prompts(self._reading.counters)

    def _prompts(self, counters: Counters) -> Iterator[Metric]:
        splits = {"train": len(self._catalog.train), "heldout": len(self._catalog.heldout)}
        yield gauges_by("tba_prompts", "Prompts uploaded, by split", "split", splits)
        text = "Prompts that can fill a slot of a batch now"
        yield GaugeMetricFamily("tba_buffer_drawable_prompts", text, value=counters.index.num_drawable)


def _counter_families(counters: Counters) -> Iterator[Metric]:
    totals = counters.totals
    # outcomes that never occurred are shown as 0, since a rate needs a first value
    pushed = {outcome: totals.get(f"pushed:{outcome}", 0) for outcome in PUSH_OUTCOMES}
    yield _by("tba_rollouts", "Rollouts pushed, by outcome", "outcome", pushed)
    yield _by(
        "tba_buffer_refused", "Pushed rollouts that were not stored, by reason", "reason", counters.group("refused")
    )
    yield _by(
        "tba_buffer_foreign_writes",
        "Refused writes to a lease of another searcher, or under the id of another component, by act",
        "act",
        counters.group("foreign"),
    )
    yield _by("tba_buffer_evicted", "Stored rollouts that were evicted, by reason", "reason", counters.group("evicted"))
    yield _by("tba_buffer_rescored", "Rollouts scored after they were stored", "outcome", counters.group("rescored"))
    for name, counted, text in (
        ("tba_drawn_rollouts", "drawn", "Rollouts drawn for batches"),
        ("tba_void_rollouts", "void", "Rollouts of drawn batches that became void"),
        ("tba_trained_rollouts", "trained", "Rollouts of batches that a step used"),
        ("tba_published_versions", "marks", "Versions announced"),
    ):
        yield CounterMetricFamily(name, text, value=totals.get(counted, 0))
    events = {"drawn": totals.get("batches", 0), "acked": counters.num_acked}
    yield _by("tba_buffer_batches", "Batches, by outcome", "event", events)
    yield _by("tba_trainer_refused", "Rollouts that the trainer refused", "reason", counters.group("trainer_refused"))
    yield _by(
        "tba_skipped_batches", "Batches consumed by a step that skipped them", "reason", counters.group("skipped")
    )
    # `slots` also counts rollouts, which are no slots
    slots = counters.group("slots")
    kinds = {kind: slots.get(kind, 0) for kind in ("recent", "replay", "fallback")}
    yield _by("tba_buffer_slots", "Slots of drawn batches, by kind", "kind", kinds)
    leases = counters.group("leases")
    ended = {event: leases.get(event, 0) for event in LEASE_EVENTS}
    yield _by("tba_buffer_leases", "Leases, by outcome", "event", ended)
    # a histogram of Prometheus is cumulative: each bucket holds those before it
    ages = [
        *((str(float(edge)), _up_to(counters.ages, edge)) for edge in AGE_BUCKETS),
        ("+Inf", sum(counters.ages.values())),
    ]
    yield HistogramMetricFamily(
        "tba_policy_age_steps",
        "Policy age of rollouts when a step consumed them",
        buckets=ages,
        sum_value=sum(age * number for age, number in counters.ages.items()),
    )


def _total_families(reading: Reading) -> Iterator[Metric]:
    tokens = reading.counters.tokens()
    for name, number, text in (
        ("tba_generated_tokens", tokens.generated, "Completion tokens of stored rollouts"),
        ("tba_trained_tokens", tokens.trained, "Completion tokens that steps trained on"),
    ):
        yield CounterMetricFamily(name, text, value=number)
    yield _by("tba_component_seconds", "Time that components were there", "kind", reading.counters.times)


def _gauge_families(reading: Reading) -> Iterator[Metric]:
    counters, index = reading.counters, reading.counters.index
    stored = {"scored": index.num_scored, "pending": index.num_pending, "failed": index.num_failed}
    yield gauges_by("tba_buffer_rollouts", "Rollouts stored now, by reward status", "status", stored)
    # None is absent, not 0: that would be a reward
    text = "Mean reward of the recent part of the buffer"
    yield GaugeMetricFamily("tba_buffer_mean_reward_recent", text, value=reading.mean_reward_recent)
    for name, value, text in (
        ("tba_buffer_payload_bytes", index.payload_bytes, "Bytes of the stored rollouts, as pushed"),
        ("tba_buffer_index_bytes", index.memory_bytes(), "Memory of the index"),
        (
            "tba_buffer_log_events_since_checkpoint",
            index.position - counters.checkpoint_position,
            "Log positions that a restart replays",
        ),
        ("tba_buffer_open_leases", counters.num_open_leases, "Leases that have not ended"),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    # absent until a version is announced: step 0 is a version too
    latest = reading.run.latest_version
    steps = {} if latest is None else {"buffer": PolicyVersion.parse(latest).step}
    yield gauges_by("tba_weight_version", "Step of the newest announced version", "role", steps)
    waits = shown_waits(Counter(wait.name for wait in reading.waits))
    yield gauges_by("tba_waits", "Current waits, by the name of the wait", "name", waits)


def _run_families(reading: Reading) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "tba_run_step", "Last acked step of the active lineage", value=reading.counters.trainer.step
    )
    # a series for each state, so that a dashboard shows when each of them held
    states = {state: float(state == reading.run.state) for state in get_args(RunState)}
    yield gauges_by("tba_run_state", "1 for the state that the run is in", "state", states)
    for name, number, text in (
        ("tba_redis_losses_accepted", reading.run.num_losses_accepted, "Losses of Redis that were accepted"),
        ("tba_redis_lost_changes", reading.run.num_lost_changes, "Acknowledged changes that were accepted as lost"),
    ):
        yield CounterMetricFamily(name, text, value=number)
    # a rate needs a first value: the waits for data are there from the beginning
    waited_s = {**dict.fromkeys(DATA_WAITS, 0.0), **reading.trainer_waited_s}
    text = "Time that trainers have waited, by the name of the wait"
    yield _by("tba_trainer_wait_seconds", text, "name", waited_s)
    # None is absent, not 0: nothing of tba knows a number
    yield GaugeMetricFamily("tba_searchers_desired", "Desired number of searchers", value=reading.searchers_desired)
    failures = reading.counters.group("scaling_failures")
    yield _by("tba_scaling_failures", "Attempts to change the number of searchers that failed", "reason", failures)


def _by(name: str, text: str, label: str, counts: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in counts.items():
        family.add_metric([value], number)
    return family


def _up_to(ages: Mapping[int, int], edge: int) -> int:
    return sum(number for age, number in ages.items() if age <= edge)


def shown_waits(waits: Counter[str]) -> dict[str, int]:
    """Return the most frequent waits by name, and the rest as one."""
    # names come from heartbeats, and labels must stay few
    shown = dict(waits.most_common(WAITS_SHOWN))
    rest = waits.total() - sum(shown.values())
    return {**shown, OTHER_WAITS: shown.get(OTHER_WAITS, 0) + rest} if rest else shown
