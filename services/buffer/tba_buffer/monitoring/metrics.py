"""The metrics of GET /metrics.

Counts cover the whole run. They are read from Redis and the index at each GET /metrics, so they neither start again
with this process nor differ from GET /v1/stats. Only the times of requests are of this process alone.
docs/operations.md lists the metrics; a test compares the two.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tba.api import ENDED, ComponentInfo, RunState, WaitInfo
from tba.versions import PolicyVersion
from tba.wire import STARTED_AT_S, WAITED_S
from tba_buffer.monitoring.stats import LEASE_EVENTS, PUSH_OUTCOMES, Counters, StatsReader
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.run.components import Components
from tba_buffer.run.state import RunStateReader
from tba_buffer.sampling.draw import WAIT_SENTENCES
from tba_buffer.storage.context import RunHash

F = TypeVar("F", Count, Gauge)
AGE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WAITS_SHOWN = 30
BATCH_WAIT = "batch"
OTHER_WAITS = "other"
DATA_WAITS = (BATCH_WAIT, *WAIT_SENTENCES)
"""The waits of a trainer for a batch."""
KINDS: tuple[str, ...] = ("searcher", "trainer", "buffer", "reward")
"""Kinds of components that are shown even when there is none."""
LONGEST_SHOWN = 64
MAX_NAMES = 96
"""Most gauges shown per kind of component, since labels must stay few. GET /v1/run shows all."""
TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TIMED = {("POST", "/v1/rollouts"): "push", ("POST", "/v1/batches"): "draw_batch", ("POST", "/v1/leases"): "lease"}


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
        searchers_desired: returns the desired number of searchers for a state of the run; None: not known here.
        durability_problem: returns why Redis could lose acknowledged changes, or None.
        loss: returns a sentence about a loss of acknowledged changes that nobody has accepted, or None.
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
        registry.register(self)

    async def refresh(self) -> None:
        """Read the values that `collect` yields.

        Raises:
            UnavailableError: Redis did not answer; `collect` continues with the values from before.
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
        """Yield every metric except the times of requests; before the first `refresh` only those about Redis."""
        # these two are there even without a reading: alerts need them while Redis is away
        is_durable = self._redis_answers and self._durability_problem() is None
        yield Gauge(
            "tba_redis_durable", "1 while Redis answers and can keep what the buffer acknowledges", value=is_durable
        )
        yield Gauge(
            "tba_redis_lost_data",
            "1 while Redis lacks acknowledged changes and no operator has accepted their loss",
            value=self._loss() is not None,
        )
        if self._reading is not None:
            yield from _counter_families(self._reading.counters)
            yield from _gauge_families(self._reading)
            yield from component_families(self._reading.components, self._reading.waits)
            splits = {"train": len(self._catalog.train), "heldout": len(self._catalog.heldout)}
            yield _by(Gauge, "tba_prompts", "Prompts uploaded, by split", "split", splits)


def _counter_families(counters: Counters) -> Iterator[Metric]:
    totals = counters.totals
    for name, group, label, text in (
        ("tba_buffer_refused", "refused", "reason", "Pushed rollouts that were not stored, by reason"),
        (
            "tba_buffer_foreign_writes",
            "foreign",
            "act",
            "Refused writes to a lease of another searcher, or under the id of another component, by act",
        ),
        ("tba_buffer_evicted", "evicted", "reason", "Stored rollouts that were evicted, by reason"),
        ("tba_buffer_rescored", "rescored", "outcome", "Rollouts scored after they were stored"),
        ("tba_trainer_refused", "trainer_refused", "reason", "Rollouts that the trainer refused"),
        ("tba_skipped_batches", "skipped", "reason", "Batches consumed by a step that skipped them"),
        ("tba_scaling_failures", "scaling_failures", "reason", "Failed changes of the number of searchers, by reason"),
    ):
        yield _by(Count, name, text, label, counters.group(group))
    # what never occurred is shown as 0, since a rate needs a first value; `slots` also counts rollouts, no slots
    for name, group, label, shown, text in (
        ("tba_rollouts", "pushed", "outcome", PUSH_OUTCOMES, "Rollouts pushed, by outcome"),
        ("tba_buffer_slots", "slots", "kind", ("recent", "replay", "fallback"), "Slots of drawn batches, by kind"),
        ("tba_buffer_leases", "leases", "event", LEASE_EVENTS, "Leases, by outcome"),
    ):
        counted = counters.group(group)
        yield _by(Count, name, text, label, {each: counted.get(each, 0) for each in shown})
    events = {"drawn": totals.get("batches", 0), "acked": counters.num_acked}
    yield _by(Count, "tba_buffer_batches", "Batches, by outcome", "event", events)
    tokens = counters.tokens()
    for name, number, text in (
        ("tba_drawn_rollouts", totals.get("drawn", 0), "Rollouts drawn for batches"),
        ("tba_void_rollouts", totals.get("void", 0), "Rollouts of drawn batches that became void"),
        ("tba_trained_rollouts", totals.get("trained", 0), "Rollouts of batches that a step used"),
        ("tba_published_versions", totals.get("marks", 0), "Versions announced"),
        ("tba_generated_tokens", tokens.generated, "Completion tokens of stored rollouts"),
        ("tba_trained_tokens", tokens.trained, "Completion tokens that steps trained on"),
    ):
        yield Count(name, text, value=number)
    yield _by(Count, "tba_component_seconds", "Time that components were there", "kind", counters.times)
    # a histogram of Prometheus is cumulative: each bucket holds those before it
    ages = [
        (str(float(edge)), sum(number for age, number in counters.ages.items() if age <= edge)) for edge in AGE_BUCKETS
    ]
    yield HistogramMetricFamily(
        "tba_policy_age_steps",
        "Policy age of rollouts when a step consumed them",
        buckets=[*ages, ("+Inf", sum(counters.ages.values()))],
        sum_value=sum(age * number for age, number in counters.ages.items()),
    )


def _gauge_families(reading: Reading) -> Iterator[Metric]:
    counters, index = reading.counters, reading.counters.index
    stored = {"scored": index.num_scored, "pending": index.num_pending, "failed": index.num_failed}
    yield _by(Gauge, "tba_buffer_rollouts", "Rollouts stored now, by reward status", "status", stored)
    # None is absent, not 0: that would be a reward
    text = "Mean reward of the recent part of the buffer"
    yield Gauge("tba_buffer_mean_reward_recent", text, value=reading.mean_reward_recent)
    for name, value, text in (
        ("tba_buffer_payload_bytes", index.payload_bytes, "Bytes of the stored rollouts, as pushed"),
        ("tba_buffer_index_bytes", index.memory_bytes(), "Memory of the index"),
        (
            "tba_buffer_log_events_since_checkpoint",
            index.position - counters.checkpoint_position,
            "Log positions that a restart replays",
        ),
        ("tba_buffer_open_leases", counters.num_open_leases, "Leases that have not ended"),
        ("tba_buffer_drawable_prompts", index.num_drawable, "Prompts that can fill a slot of a batch now"),
    ):
        yield Gauge(name, text, value=value)
    # absent until a version is announced: step 0 is a version too
    latest = reading.run.latest_version
    steps = {} if latest is None else {"buffer": PolicyVersion.parse(latest).step}
    yield _by(Gauge, "tba_weight_version", "Step of the newest announced version", "role", steps)
    waits = shown_waits(Counter(wait.name for wait in reading.waits))
    yield _by(Gauge, "tba_waits", "Current waits, by the name of the wait", "name", waits)
    yield Gauge("tba_run_step", "Last acked step of the active lineage", value=counters.trainer.step)
    # a series for each state, so that a dashboard shows when each of them held
    states = {state: float(state == reading.run.state) for state in get_args(RunState)}
    yield _by(Gauge, "tba_run_state", "1 for the state that the run is in", "state", states)
    for name, number, text in (
        ("tba_redis_losses_accepted", reading.run.num_losses_accepted, "Losses of Redis that were accepted"),
        ("tba_redis_lost_changes", reading.run.num_lost_changes, "Acknowledged changes that were accepted as lost"),
    ):
        yield Count(name, text, value=number)
    # a rate needs a first value: the waits for data are there from the beginning
    waited_s = {**dict.fromkeys(DATA_WAITS, 0.0), **reading.trainer_waited_s}
    text = "Time that trainers have waited, by the name of the wait"
    yield _by(Count, "tba_trainer_wait_seconds", text, "name", waited_s)
    # None is absent, not 0: nothing of tba knows a number
    yield Gauge("tba_searchers_desired", "Desired number of searchers", value=reading.searchers_desired)


def component_families(components: Sequence[ComponentInfo], waits: Sequence[WaitInfo]) -> Iterator[Metric]:
    """Yield the metrics of components and waits, the gauges of the live trainer with the newest heartbeat, and the
    sums of the gauges over all live searchers."""
    # kinds without a component are shown as 0: alerts compare with that
    none = dict.fromkeys(KINDS, 0)
    text = "Components with a recent sign of life, by kind"
    alive = Counter(item.kind for item in components if item.alive)
    yield _by(Gauge, "tba_components_alive", text, "kind", {**none, **alive})
    text = "Components without a recent sign of life that did not announce their end, by kind"
    silent = Counter(item.kind for item in components if not item.alive and item.state not in ENDED)
    yield _by(Gauge, "tba_components_silent", text, "kind", {**none, **silent})
    ages_s: dict[str, float] = {}
    for item in components:
        ages_s[item.kind] = min(item.heartbeat_age_s, ages_s.get(item.kind, item.heartbeat_age_s))
    text = "Age of the newest sign of life, by kind"
    yield _by(Gauge, "tba_component_heartbeat_age_seconds", text, "kind", ages_s)
    # names come from heartbeats and labels must stay few: all but the longest waits share one name
    longest_s: dict[tuple[str, str], float] = {}
    for wait in sorted(waits, key=lambda wait: -wait.for_s):
        kind = wait.kind or "buffer"
        is_shown = len(longest_s) < LONGEST_SHOWN or (kind, wait.name) in longest_s
        longest_s.setdefault((kind, wait.name if is_shown else OTHER_WAITS), wait.for_s)
    longest = Gauge("tba_component_wait_seconds", "The longest wait now, by kind and name", labels=["kind", "name"])
    for labels, for_s in longest_s.items():
        longest.add_metric(labels, for_s)
    yield longest
    late_s = dict.fromkeys(KINDS, 0.0)
    for wait in waits:
        kind = wait.kind or "buffer"
        late_s[kind] = max(late_s.get(kind, 0.0), -wait.deadline_in_s)
    text = "How long the most overdue wait is past its own deadline, by kind"
    yield _by(Gauge, "tba_component_wait_overdue_seconds", text, "kind", late_s)
    # while one trainer takes over from another, both are alive: the one that was heard of last counts
    trainers = sorted(
        (item for item in components if item.alive and item.kind == "trainer"), key=lambda item: item.heartbeat_age_s
    )
    yield _family("tba_trainer_gauge", "Gauges of the trainer", trainers[0].gauges if trainers else {})
    sums: Counter[str] = Counter()
    for item in components:
        if item.alive and item.kind == "searcher":
            for name, value in item.gauges.items():
                sums[name] += value  # pyright: ignore[reportArgumentType]
    yield _family("tba_searcher_gauge", "Gauges of the searchers, summed over those alive", sums)


def _family(name: str, text: str, gauges: Mapping[str, float]) -> Gauge:
    shown = [name for name in gauges if name != STARTED_AT_S and not name.startswith(WAITED_S)]
    shown.sort(key=lambda gauge: ("/" in gauge, gauge))  # those of single tasks and reasons last: they may be many
    return _by(Gauge, name, f"{text}, by name", "name", {gauge: gauges[gauge] for gauge in shown[:MAX_NAMES]})


def _by(family: type[F], name: str, text: str, label: str, values: Mapping[str, float]) -> F:
    """Return a metric family with one label; `values` maps each value of the label to the metric's value."""
    found = family(name, text, labels=[label])
    for value, number in values.items():
        found.add_metric([value], number)
    return found


def shown_waits(waits: Counter[str]) -> dict[str, int]:
    """Return the numbers of the WAITS_SHOWN most frequent waits by name, and the sum of the rest as OTHER_WAITS."""
    # names come from heartbeats, and labels must stay few
    shown = dict(waits.most_common(WAITS_SHOWN))
    rest = waits.total() - sum(shown.values())
    return {**shown, OTHER_WAITS: shown.get(OTHER_WAITS, 0) + rest} if rest else shown


class RequestTimes:
    """ASGI middleware: measures time and status of the requests in TIMED. The time of a draw includes its long poll."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self.app = app
        text = "Time from the first byte of a request to the last of its answer"
        self._seconds = Histogram("tba_request_seconds", text, ["operation"], buckets=TIME_BUCKETS, registry=registry)
        self._answered = prometheus_client.Counter(
            "tba_requests", "Requests answered", ["operation", "status"], registry=registry
        )
        # a gauge of its own: a long poll that is held shows in no count of answers
        self._in_flight = prometheus_client.Gauge(
            "tba_requests_in_flight", "Requests being served", ["operation"], registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        operation = TIMED.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        # status "none": the connection ended before an answer began
        status, began_s = "none", time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        in_flight = self._in_flight.labels(operation)
        in_flight.inc()
        try:
            await self.app(scope, receive, watched)
        finally:
            in_flight.dec()
            self._seconds.labels(operation).observe(time.perf_counter() - began_s)
            self._answered.labels(operation, status).inc()
