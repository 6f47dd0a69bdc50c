"""What GET /metrics shows.

Counts are those of the whole run: read from Redis and the index when /metrics is asked, so they neither start again
with this process nor differ from GET /v1/stats. Only the times of requests are this process' own. docs/operations.md
lists the metrics, and a test holds the two together.
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
from tba_buffer.component_gauges import gauge_families
from tba_buffer.component_metrics import component_families
from tba_buffer.components import Components
from tba_buffer.draws import WAIT_SENTENCES
from tba_buffer.prompts import Catalog
from tba_buffer.request_times import RequestMetrics
from tba_buffer.run_state import RunControl, RunFields
from tba_buffer.stats import LEASE_EVENTS, PUSH_OUTCOMES, Levels, StatsReader

AGE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WAITS_SHOWN = 30
BATCH_WAIT = "batch"
OTHER_WAITS = "other"
DATA_WAITS = (BATCH_WAIT, *WAIT_SENTENCES)
"""What a trainer that waits for a batch may wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one answer of /metrics is made from."""

    levels: Levels
    by_length: Mapping[str, int]
    mean_reward_recent: float | None
    components: Sequence[ComponentInfo]
    waits: Sequence[WaitInfo]
    trainer_waited_s: Mapping[str, float]
    run: RunFields
    searchers_wanted: int | None


class Metrics(Collector):
    """The metrics of the run.

    Args:
        registry: where they are registered.
        stats: the counts.
        components: who is alive, and who waits.
        catalog: the prompts.
        run: the state of the run.
        searchers_wanted: how many searchers there should be; None: nobody says.
        promise_problem: why Redis cannot keep what it acknowledges, or None.
        loss: what Redis has lost of what was acknowledged, while that is not accepted.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        stats: StatsReader,
        components: Components,
        catalog: Catalog,
        run: RunControl,
        searchers_wanted: Callable[[], Awaitable[int | None]],
        promise_problem: Callable[[], str | None],
        loss: Callable[[], str | None],
    ) -> None:
        self._stats = stats
        self._components = components
        self._catalog = catalog
        self._run = run
        self._searchers_wanted = searchers_wanted
        self._promise_problem, self._loss = promise_problem, loss
        self._reading: Reading | None = None
        self._redis_answers = False
        self.times = RequestMetrics(registry)
        registry.register(self)

    async def refresh(self) -> None:
        """Read what `collect` shows.

        Raises:
            UnavailableError: Redis did not answer; `collect` goes on with what it had.
        """
        self._redis_answers = False
        levels = await self._stats.levels()
        detail = self._stats.detail(levels)
        infos, waits = await self._components.read()
        fields = await self._run.read()
        self._reading = Reading(
            levels=levels,
            by_length=detail.stored.by_length,
            mean_reward_recent=detail.mean_reward_recent,
            components=infos,
            waits=waits,
            trainer_waited_s=await self._components.trainer_waits.totals(),
            run=fields,
            searchers_wanted=await self._searchers_wanted(),
        )
        self._redis_answers = True

    def collect(self) -> Iterator[Metric]:
        """Every metric but the times; only what is known of Redis before the first `refresh`."""
        kept = self._redis_answers and self._promise_problem() is None
        yield GaugeMetricFamily(
            "tba_redis_keeps_promise", "1 while Redis answers and can keep what the buffer acknowledges", value=kept
        )
        yield GaugeMetricFamily(
            "tba_redis_lost_data",
            "1 while Redis lacks what was acknowledged, and no operator has accepted that",
            value=self._loss() is not None,
        )
        if self._reading is not None:
            yield from _counters(self._reading.levels)
            yield from _gauges(self._reading)
            yield from _run(self._reading)
            yield from component_families(self._reading.components, self._reading.waits)
            yield from gauge_families(self._reading.components)
            yield from self._prompts(self._reading.levels)

    def _prompts(self, levels: Levels) -> Iterator[Metric]:
        prompts = GaugeMetricFamily("tba_prompts", "Prompts uploaded, by split", labels=["split"])
        prompts.add_metric(["train"], len(self._catalog.train))
        prompts.add_metric(["heldout"], len(self._catalog.heldout))
        yield prompts
        drawable = GaugeMetricFamily("tba_buffer_drawable_prompts", "Prompts that can fill a slot of a batch now")
        drawable.add_metric([], levels.index.num_drawable)
        yield drawable


def _counters(levels: Levels) -> Iterator[Metric]:
    counters = levels.counters
    pushed = CounterMetricFamily("tba_rollouts", "Rollouts pushed, by outcome", labels=["service", "outcome"])
    for outcome in PUSH_OUTCOMES:
        pushed.add_metric(["buffer", outcome], counters.get(f"pushed:{outcome}", 0))
    yield pushed
    yield _by(
        "tba_buffer_refused", "Pushed rollouts that were not stored, by reason", "reason", levels.group("refused")
    )
    yield _by(
        "tba_buffer_foreign_acts",
        "Acts on a lease of another searcher, or under the id of another component, by what was refused",
        "act",
        levels.group("foreign"),
    )
    dropped = CounterMetricFamily(
        "tba_buffer_evicted",
        "Stored rollouts that were evicted, by reason and number of response tokens",
        labels=["reason", "length"],
    )
    for reason, lengths in levels.evicted_by_length().items():
        for length, number in lengths.items():
            dropped.add_metric([reason, length], number)
    yield dropped
    for name, text in (
        ("heartbeats_refused", "Heartbeats that were not taken, by reason"),
        ("components_forgotten", "Components that were forgotten, by reason"),
    ):
        yield _by(f"tba_{name}", text, "reason", levels.group(name))
    yield _by("tba_buffer_rescored", "Rollouts scored after they were stored", "outcome", levels.group("rescored"))
    for name, counted, text in (
        ("tba_drawn_rollouts", "drawn", "Rollouts drawn for batches"),
        ("tba_void_rollouts", "void", "Rollouts of drawn batches that became void"),
        ("tba_trained_rollouts", "trained", "Rollouts of batches that a step was made with"),
        ("tba_sync_marks", "marks", "Versions announced"),
    ):
        yield CounterMetricFamily(name, text, value=counters.get(counted, 0))
    events = {"drawn": counters.get("batches", 0), "acked": levels.num_acked}
    yield _by("tba_buffer_batches", "Batches, by what became of them", "event", events)
    yield _by("tba_trainer_refused", "Rollouts that the trainer refused", "reason", levels.group("trainer_refused"))
    yield _by("tba_skipped_batches", "Batches consumed by a step that skipped them", "reason", levels.group("skipped"))
    slots = levels.group("slots")
    kinds = {kind: slots.get(kind, 0) for kind in ("recent", "replay", "fallback")}
    yield _by("tba_buffer_slots", "Slots of drawn batches, by kind", "kind", kinds)
    leases = levels.group("leases")
    ended = {event: leases.get(event, 0) for event in LEASE_EVENTS}
    yield _by("tba_buffer_leases", "Leases, by what became of them", "event", ended)
    ages = [
        *((str(float(edge)), _up_to(levels.ages, edge)) for edge in AGE_BUCKETS),
        ("+Inf", sum(levels.ages.values())),
    ]
    yield HistogramMetricFamily(
        "tba_policy_age_steps",
        "Policy age of rollouts when a step consumed them",
        buckets=ages,
        sum_value=sum(age * number for age, number in levels.ages.items()),
    )


def _gauges(reading: Reading) -> Iterator[Metric]:
    levels, index = reading.levels, reading.levels.index
    stored = GaugeMetricFamily("tba_buffer_rollouts", "Rollouts stored now, by reward status", labels=["status"])
    stored.add_metric(["scored"], index.num_scored)
    stored.add_metric(["pending"], index.num_pending)
    stored.add_metric(["failed"], index.num_failed)
    yield stored
    by_length = GaugeMetricFamily(
        "tba_buffer_rollouts_by_length", "Rollouts stored now, by number of response tokens", labels=["length"]
    )
    for length, number in reading.by_length.items():
        by_length.add_metric([length], number)
    yield by_length
    recent = GaugeMetricFamily("tba_buffer_mean_reward_recent", "Mean reward of the recent part of the buffer")
    if reading.mean_reward_recent is not None:
        recent.add_metric([], reading.mean_reward_recent)
    yield recent
    for name, value, text in (
        ("tba_buffer_payload_bytes", index.payload_bytes, "Bytes of the stored rollouts, as pushed"),
        ("tba_buffer_index_bytes", index.memory_bytes(), "Memory of the index"),
        ("tba_buffer_log_tail_events", index.position - levels.base_position, "Log positions that a restart replays"),
        ("tba_buffer_open_leases", levels.num_open_leases, "Leases that have not ended"),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    version = GaugeMetricFamily("tba_weight_version", "Step of the newest announced version", labels=["role"])
    if reading.run.latest_version is not None:
        version.add_metric(["buffer"], PolicyVersion.parse(reading.run.latest_version).step)
    yield version
    unreadable = GaugeMetricFamily("tba_unreadable_items", "Stored items that cannot be read, by kind", labels=["kind"])
    for kind, number in levels.unreadable.items():
        unreadable.add_metric([kind], number)
    yield unreadable
    waits = GaugeMetricFamily("tba_waits", "Who waits now, by the name of the wait", labels=["name"])
    for name, number in shown_waits(Counter(wait.name for wait in reading.waits)).items():
        waits.add_metric([name], number)
    yield waits


def _run(reading: Reading) -> Iterator[Metric]:
    yield GaugeMetricFamily("tba_run_step", "Last acked step of the living lineage", value=reading.levels.trainer.step)
    states = GaugeMetricFamily("tba_run_state", "1 for the state that the run is in", labels=["state"])
    for state in get_args(RunState):
        states.add_metric([state], state == reading.run.state)
    yield states
    for name, number, text in (
        ("tba_redis_losses_accepted", reading.run.num_losses_accepted, "Losses of Redis that were accepted"),
        ("tba_redis_lost_changes", reading.run.num_lost_changes, "Acknowledged changes that were accepted as lost"),
    ):
        yield CounterMetricFamily(name, text, value=number)
    waited = CounterMetricFamily(
        "tba_trainer_wait_seconds", "Time that trainers have waited, by the name of the wait", labels=["name"]
    )
    # a rate needs a first value: the waits for data are there from the beginning
    for name, waited_s in {**dict.fromkeys(DATA_WAITS, 0.0), **reading.trainer_waited_s}.items():
        waited.add_metric([name], waited_s)
    yield waited
    wanted = GaugeMetricFamily("tba_searchers_wanted", "Searchers that there should be")
    if reading.searchers_wanted is not None:
        wanted.add_metric([], reading.searchers_wanted)
    yield wanted
    failures = reading.levels.group("scaling_failures")
    yield _by("tba_scaling_failures", "Attempts to change the number of searchers that failed", "reason", failures)


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in counts.items():
        family.add_metric([value], number)
    return family


def _up_to(ages: Mapping[int, int], edge: int) -> int:
    return sum(number for age, number in ages.items() if age <= edge)


def shown_waits(waits: Counter[str]) -> dict[str, int]:
    """The most frequent waits by name, the rest as one: names come from heartbeats, and labels must stay few."""
    shown = dict(waits.most_common(WAITS_SHOWN))
    rest = waits.total() - sum(shown.values())
    return {**shown, OTHER_WAITS: shown.get(OTHER_WAITS, 0) + rest} if rest else shown
