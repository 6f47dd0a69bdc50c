"""GET /v1/stats, and what GET /metrics is made from: the index knows what is stored, Redis has counted what happened.

levels    cheap: one read of the counters and a level index; GET /metrics and the upkeep ask for no more
stats     levels, rates, and the detail of what is stored (O(live rollouts); of large buffers now and then)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tba.api import Stats, StoredStats
from tba.versions import PolicyVersion
from tba_buffer.context import Context
from tba_buffer.index import Index
from tba_buffer.lineage import Lineages
from tba_buffer.prompts import Catalog
from tba_buffer.rates import RateWindow
from tba_buffer.redis_link import redis_errors
from tba_buffer.stored_stats import stored_stats
from tba_buffer.view import IndexView

LEASE_EVENTS = ("granted", "fulfilled", "expired", "returned", "refused")
PUSH_OUTCOMES = ("new", "duplicate", "refused")
ALWAYS_FRESH_ROLLOUTS = 10_000
DETAIL_EVERY_S = 1.0
DETAIL_SHARE = 0.02
"""Most of this process' time that may go into the detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The counters of the run, what the index holds, and where the trainer stands."""

    counters: Mapping[str, int]
    ages: Mapping[int, int]
    """Policy age in steps when consumed -> rollouts."""
    num_open_leases: int
    num_acked: int
    base_position: int
    trainer: PolicyVersion
    """Lineage that owns the run, and its last acked step."""
    latest_version: str | None
    unreadable: Mapping[str, int]
    """Kind of stored item -> how many were found that cannot be read."""
    index: Index

    def group(self, name: str) -> dict[str, int]:
        """The counters `name:<what>`, by what; not those of a group within it."""
        parts = ((key.split(":"), value) for key, value in sorted(self.counters.items()))
        return {key[1]: value for key, value in parts if key[0] == name and len(key) == 2}

    def evicted_by_length(self) -> dict[str, dict[str, int]]:
        """Reason -> length bucket -> rollouts evicted, ever."""
        found: dict[str, dict[str, int]] = {}
        for key, value in sorted(self.counters.items()):
            parts = key.split(":")
            if parts[0] == "evicted" and len(parts) == 3:
                found.setdefault(parts[1], {})[parts[2]] = value
        return found

    def pace(self) -> dict[str, int]:
        """The counts that rates are made of."""
        return {
            "generated": self.counters.get("generated", 0),
            "evicted": sum(self.group("evicted").values()),
            "drawn": self.counters.get("drawn", 0),
            "trained": self.counters.get("trained", 0),
        }


@dataclass(frozen=True, slots=True)
class Detail:
    """What takes a look at every stored rollout. From `due_s` on (monotonic) it is made again if it is out of date."""

    due_s: float
    trainer: PolicyVersion
    mean_reward_recent: float | None
    stored: StoredStats


class StatsReader:
    """Reads the counts of the run.

    Args:
        context: Redis and settings.
        catalog: the prompts.
        view: the index.
        lineages: what policy age is measured along.
    """

    def __init__(self, context: Context, *, catalog: Catalog, view: IndexView, lineages: Lineages) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._lineages = lineages
        self._window = RateWindow()
        self._detail: Detail | None = None

    async def levels(self) -> Levels:
        """Everything that is cheap to know.

        Raises:
            UnavailableError: Redis did not answer.
        """
        index, keys = await self._view.level(), self._context.keys
        with redis_errors("read the counters"):
            async with self._context.redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.counters)
                pipe.hgetall(keys.ages)
                pipe.hlen(keys.leases)
                pipe.hlen(keys.ledger_steps)
                pipe.hget(keys.base, "position")
                pipe.hmget(keys.run, "lineage", "step", "latest_version")
                counters, ages, num_leases, num_acked, base, (lineage, step, latest) = await pipe.execute()
        unreadable = await self._context.unreadable.info(self._context.redis, keys)
        return Levels(
            unreadable={} if unreadable is None else unreadable.num,
            counters=self._context.whole_numbers(counters),
            ages=dict(sorted(self._ages(ages).items())),
            num_open_leases=num_leases,
            num_acked=num_acked,
            base_position=self._context.whole("base position", base),
            trainer=PolicyVersion(self._context.whole("lineage", lineage), self._context.whole("step", step)),
            latest_version=None if latest is None else latest.decode(errors="replace"),
            index=index,
        )

    def _ages(self, raw: Mapping[bytes, bytes]) -> dict[int, int]:
        ages = self._context.whole_numbers(raw)
        return {int(age): number for age, number in ages.items() if age.lstrip("-").isdecimal()}

    async def sample(self) -> None:
        """Remember where the counters stand, for the rates. The upkeep calls it every second.

        Raises:
            UnavailableError: Redis did not answer.
        """
        levels = await self.levels()
        self._window.add(time.monotonic(), levels.pace())

    async def read(self) -> Stats:
        """All counts.

        Raises:
            UnavailableError: Redis did not answer.
        """
        levels = await self.levels()
        index, counters, slots = levels.index, levels.counters, levels.group("slots")
        generated, trained, leases = counters.get("generated", 0), counters.get("trained", 0), levels.group("leases")
        detail = self.detail(levels)
        return Stats(
            run=self._context.run,
            num_rollouts=index.num_live,
            num_scored=index.num_scored,
            num_pending=index.num_pending,
            num_failed=index.num_failed,
            num_prompts_train=len(self._catalog.train),
            num_prompts_heldout=len(self._catalog.heldout),
            num_prompts_seen=int(np.count_nonzero(index.counts)),
            num_prompts_drawable=index.num_drawable,
            payload_bytes=index.payload_bytes,
            log_position=index.position,
            base_position=levels.base_position,
            index_bytes=index.memory_bytes(),
            replica=self._context.replica.number,
            num_marks=counters.get("marks", 0),
            pushed={name: counters.get(f"pushed:{name}", 0) for name in PUSH_OUTCOMES},
            refused=levels.group("refused"),
            evicted=levels.group("evicted"),
            evicted_by_length=levels.evicted_by_length(),
            rescored=levels.group("rescored"),
            leases={"open": levels.num_open_leases, **{name: leases.get(name, 0) for name in LEASE_EVENTS}},
            rollouts_generated=generated,
            rollouts_drawn=counters.get("drawn", 0),
            rollouts_trained=trained,
            rollouts_refused_by_trainer=levels.group("trainer_refused"),
            batches_skipped=levels.group("skipped"),
            samples_per_insert=trained / generated if generated else None,
            heartbeats_refused=levels.group("heartbeats_refused"),
            components_forgotten=levels.group("components_forgotten"),
            slots=slots,
            unique_ratio=_ratio(slots, "distinct_rollouts", "rollouts"),
            realised_most_on_policy=_ratio(slots, "recent", "total"),
            mean_reward_recent=detail.mean_reward_recent,
            policy_age_histogram=dict(levels.ages),
            rates=self._window.rates(time.monotonic(), levels.pace()),
            stored=detail.stored,
        )

    def detail(self, levels: Levels) -> Detail:
        """The detail of what is stored; kept until out of date and, of large buffers, until due."""
        kept, index, now_s = self._detail, levels.index, time.monotonic()
        if kept is not None:
            if (kept.stored.log_position, kept.trainer) == (index.position, levels.trainer):
                return kept
            if index.num_live > ALWAYS_FRESH_ROLLOUTS and now_s < kept.due_s:
                return kept
        recent = index.recent_rows()
        mean_reward = float(index.column("reward", recent).mean()) if len(recent) else None
        stored = stored_stats(index, self._lineages.tree, levels.trainer)
        done_s = time.monotonic()
        due_s = done_s + max(DETAIL_EVERY_S, (done_s - now_s) / DETAIL_SHARE)
        self._detail = Detail(due_s, levels.trainer, mean_reward, stored)
        return self._detail


def _ratio(counts: Mapping[str, int], part: str, whole: str) -> float | None:
    return counts.get(part, 0) / counts[whole] if counts.get(whole) else None
