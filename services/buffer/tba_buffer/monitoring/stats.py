"""The counts of GET /v1/stats and GET /metrics: the index knows what is stored, Redis has counted what happened.

Counters      cheap: one read of the counters, and the index. The upkeep asks for no more
RateWindow    how fast the cumulative counters have grown over the last minute
stored_stats  what is stored, by policy version and reward: O(live rollouts), so StatsReader keeps the answer for large
              buffers
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.api import Rates, Stats, StoredStats, TokenTotals
from tba.api.stats import NUM_DECILES
from tba.versions import PolicyVersion
from tba_buffer.index.log import SCORED
from tba_buffer.index.log_follower import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.rollouts.failures import FailureReader
from tba_buffer.rollouts.trained_steps import DROPPED
from tba_buffer.run.component_times import read_times
from tba_buffer.storage.context import Context, RunHash, needed, parse_number
from tba_buffer.storage.redis_client import redis_errors

WINDOW_S = 60.0
MIN_WINDOW_S = 1.0
NAMES = ("generated", "evicted", "drawn", "trained", "generated_tokens", "trained_tokens")


class RateWindow:
    """Samples of cumulative counts, oldest first: those of the last WINDOW_S seconds, and the one before them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, at_s: float, counts: Mapping[str, int]) -> None:
        """Add a sample of the counts NAMES at `at_s` (monotonic). While nothing was generated, drop older samples."""
        if not counts["generated"]:  # the start of the services is no time of generating
            self._samples.clear()
        self._samples.append((at_s, {name: counts[name] for name in NAMES}))
        # the newest sample before the window stays: rates are measured from there
        while len(self._samples) > 1 and self._samples[1][0] <= at_s - WINDOW_S:
            self._samples.popleft()

    def rates(self, at_s: float, counts: Mapping[str, int]) -> Rates | None:
        """Return the growth per second since the oldest sample; None before MIN_WINDOW_S, or if a count fell."""
        if not self._samples or at_s - self._samples[0][0] < MIN_WINDOW_S:
            return None
        window_s, before = at_s - self._samples[0][0], self._samples[0][1]
        grown = {name: counts[name] - before[name] for name in NAMES}
        if min(grown.values()) < 0:  # Redis was emptied or restored: the samples are of another one
            return None
        return Rates(window_s=window_s, **{f"{name}_per_s": number / window_s for name, number in grown.items()})


VERSIONS_SHOWN = 50


def stored_stats(index: Index) -> StoredStats:
    """Return statistics of the stored rollouts by version and reward. O(live rollouts): about 40 ms for a million."""
    versions, rows = sorted(index.versions().items(), reverse=True), index.live_rows()
    rewards = index.column("reward", rows)[index.column("status", rows) == SCORED]
    return StoredStats(
        log_position=index.position,
        by_version={str(version): number for version, number in versions[:VERSIONS_SHOWN]},
        num_of_older_versions=sum(number for _, number in versions[VERSIONS_SHOWN:]),
        reward_deciles=_reward_deciles(rewards),
    )


def _reward_deciles(rewards: NDArray[np.float64]) -> list[float] | None:
    if not len(rewards):
        return None
    ordered, end = rewards.copy(), len(rewards)
    # where the deciles are in the sorted values: nearest rank, in whole numbers [11]
    ranks = np.maximum(0, -(-np.arange(NUM_DECILES) * len(rewards) // (NUM_DECILES - 1)) - 1)
    for rank in np.unique(ranks)[::-1].tolist():  # one at a time: numpy takes ten times as long for several
        ordered[:end].partition(rank)
        end = rank + 1
    return ordered[ranks].tolist()


LEASE_EVENTS = ("granted", "fulfilled", "expired", "returned", "refused")
PUSH_OUTCOMES = ("new", "duplicate", "refused")
ALWAYS_FRESH_ROLLOUTS = 10_000
DETAIL_EVERY_S = 1.0
DETAIL_SHARE = 0.02
"""Largest share of the process's time that `StatsReader.detail` may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The counters of the run, the index, and the last acked step."""

    totals: Mapping[str, int]
    ages: Mapping[int, int]
    """Number of consumed rollouts by policy age: the steps between a rollout's weights and its use."""
    num_open_leases: int
    num_acked: int
    num_trained_steps: int
    """Number of stored step records (rollouts/trained_steps.py)."""
    checkpoint_position: int
    trainer: PolicyVersion
    """The active lineage, and its last acked step."""
    times: Mapping[str, float]
    """Seconds that components were alive, by kind."""
    index: Index

    def group(self, name: str) -> dict[str, int]:
        """Return the counters `name:<what>` by <what>. Names with a second colon are left out."""
        parts = ((key.split(":"), value) for key, value in sorted(self.totals.items()))
        return {key[1]: value for key, value in parts if key[0] == name and len(key) == 2}

    def tokens(self) -> TokenTotals:
        """Return the numbers of completion tokens generated and trained on."""
        return TokenTotals(
            generated=self.totals.get("tokens:generated", 0), trained=self.totals.get("tokens:trained", 0)
        )

    def rate_counts(self) -> dict[str, int]:
        """Return the counts (NAMES) for RateWindow."""
        return {
            "generated": self.totals.get("generated", 0),
            "evicted": sum(self.group("evicted").values()),
            "drawn": self.totals.get("drawn", 0),
            "trained": self.totals.get("trained", 0),
            "generated_tokens": self.totals.get("tokens:generated", 0),
            "trained_tokens": self.totals.get("tokens:trained", 0),
        }


@dataclass(frozen=True, slots=True)
class Detail:
    """Statistics over every stored rollout. `due_s`: when they may be computed again (monotonic)."""

    due_s: float
    mean_reward_recent: float | None
    stored: StoredStats


class StatsReader:
    """Reads the counts of the run."""

    def __init__(self, context: Context, *, catalog: Catalog, view: IndexView, failures: FailureReader) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._failures = failures
        self._window = RateWindow()
        self._detail: Detail | None = None

    async def counters(self) -> Counters:
        """Catch the index up, and read the counters from Redis; O(1) in the number of rollouts."""
        # first the index: the counters that follow are then at least as new
        index, keys = await self._view.catch_up(), self._context.keys
        with redis_errors("read the counters"):
            # one transaction: counters, ledger and run are of the same moment
            async with self._context.redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.counters)
                pipe.hgetall(keys.ages)
                pipe.hlen(keys.leases)
                pipe.hlen(keys.ledger_steps)
                pipe.llen(keys.trained)
                pipe.hget(keys.log_checkpoint, "position")
                pipe.hgetall(keys.component_times)
                pipe.hgetall(keys.run)
                replies = await pipe.execute()
        counters, ages, num_leases, num_acked, num_trained_steps, base, times, raw = replies
        run = RunHash(self._context, raw)
        parsed = self._context.parse_counters(ages, keys.ages)
        by_age = {needed(keys.ages, age, lambda age=age: int(age)): number for age, number in parsed.items()}
        return Counters(
            totals=self._context.parse_counters(counters),
            ages=dict(sorted(by_age.items())),
            num_open_leases=num_leases,
            num_acked=num_acked,
            num_trained_steps=num_trained_steps,
            checkpoint_position=needed(keys.log_checkpoint, "position", lambda: parse_number(base)),
            trainer=PolicyVersion(run.lineage, run.step),
            times=read_times(self._context, times),
            index=index,
        )

    async def sample(self) -> None:
        """Remember the counters, for the rates. The upkeep calls it every second."""
        self._window.add(time.monotonic(), (await self.counters()).rate_counts())

    async def read(self) -> Stats:
        """Return the answer to GET /v1/stats."""
        failed_reasons = await self._failures.reasons()
        counters = await self.counters()
        index, totals, slots = counters.index, counters.totals, counters.group("slots")
        generated, trained, leases = totals.get("generated", 0), totals.get("trained", 0), counters.group("leases")
        detail = self.detail(counters)
        return Stats(
            run=self._context.run,
            num_rollouts=index.num_live,
            num_scored=index.num_scored,
            num_pending=index.num_pending,
            num_failed=index.num_failed,
            failed_reasons=failed_reasons,
            num_used_up=index.num_used_up,
            num_prompts_train=len(self._catalog.train),
            num_prompts_heldout=len(self._catalog.heldout),
            num_prompts_seen=int(np.count_nonzero(index.counts)),
            num_prompts_drawable=index.num_drawable,
            payload_bytes=index.payload_bytes,
            log_position=index.position,
            checkpoint_position=counters.checkpoint_position,
            index_bytes=index.memory_bytes(),
            epoch=self._context.epoch.number,
            num_publications=totals.get("marks", 0),
            pushed={name: totals.get(f"pushed:{name}", 0) for name in PUSH_OUTCOMES},
            refused=counters.group("refused"),
            evicted=counters.group("evicted"),
            rescored=counters.group("rescored"),
            leases={"open": counters.num_open_leases, **{name: leases.get(name, 0) for name in LEASE_EVENTS}},
            rollouts_generated=generated,
            rollouts_drawn=totals.get("drawn", 0),
            rollouts_trained=trained,
            rollouts_refused_by_trainer=counters.group("trainer_refused"),
            batches_skipped=counters.group("skipped"),
            trained_steps={"kept": counters.num_trained_steps, "dropped": totals.get(DROPPED, 0)},
            samples_per_insert=trained / generated if generated else None,
            slots=slots,
            unique_ratio=_ratio(slots, "distinct_rollouts", "rollouts"),
            realised_most_on_policy=_ratio(slots, "recent", "total"),
            mean_reward_recent=detail.mean_reward_recent,
            policy_age_histogram=dict(counters.ages),
            tokens=counters.tokens(),
            component_seconds=dict(counters.times),
            rates=self._window.rates(time.monotonic(), counters.rate_counts()),
            stored=detail.stored,
        )

    def detail(self, counters: Counters) -> Detail:
        """Return statistics over the stored rollouts, cached until the log grows and, for large buffers, until due."""
        kept, index, now_s = self._detail, counters.index, time.monotonic()
        if kept is not None:
            if kept.stored.log_position == index.position:
                return kept
            # a small buffer is looked through at once; for a large one an older answer is good enough
            if index.num_live > ALWAYS_FRESH_ROLLOUTS and now_s < kept.due_s:
                return kept
        recent = index.recent_rows()
        mean_reward = float(index.column("reward", recent).mean()) if len(recent) else None
        stored = stored_stats(index)
        done_s = time.monotonic()
        # it takes at most DETAIL_SHARE of the time of the process
        due_s = done_s + max(DETAIL_EVERY_S, (done_s - now_s) / DETAIL_SHARE)
        self._detail = Detail(due_s, mean_reward, stored)
        return self._detail


def _ratio(counts: Mapping[str, int], part: str, whole: str) -> float | None:
    return counts.get(part, 0) / counts[whole] if counts.get(whole) else None
