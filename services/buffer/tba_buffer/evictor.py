"""Keeps what is stored within the bounds of the recipe; every rollout that goes is in the log, and counted."""

from __future__ import annotations

from dataclasses import dataclass

from tba.versions import PolicyVersion
from tba_buffer import replica
from tba_buffer.bounds import Bounds, BoundSettings, count_by_length
from tba_buffer.coalesce import Coalesced
from tba_buffer.context import Context
from tba_buffer.index import Index, Rows
from tba_buffer.lineage import Lineages
from tba_buffer.near_duplicates import NONE, NearDuplicates
from tba_buffer.redis_link import redis_errors
from tba_buffer.run_state import RunControl
from tba_buffer.view import IndexView

ROLLOUTS_PER_CALL = 500


@dataclass(frozen=True, slots=True)
class _Amount:
    num_rollouts: int = 0
    num_bytes: int = 0

    def __add__(self, other: _Amount) -> _Amount:
        return _Amount(self.num_rollouts + other.num_rollouts, self.num_bytes + other.num_bytes)

    def __sub__(self, other: _Amount) -> _Amount:
        return _Amount(self.num_rollouts - other.num_rollouts, self.num_bytes - other.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """What one call of evict.lua removes: ids (16 bytes each) and positions (8 bytes each), counts by length bucket."""

    reason: str
    accepted_by: bytes
    """The last acceptance of a loss when this was planned."""
    rollout_ids: bytes
    positions: bytes
    num_by_length: dict[str, int]
    amount: _Amount

    @classmethod
    def of(cls, index: Index, reason: str, rows: Rows, *, accepted_by: bytes) -> Victims:
        """Those of some rows."""
        return cls(
            reason=reason,
            accepted_by=accepted_by,
            rollout_ids=b"".join(index.rollout_ids(rows)),
            positions=index.column("position", rows).astype("<u8").tobytes(),
            num_by_length=count_by_length(index.column("num_tokens", rows)),
            amount=_Amount(len(rows), int(index.column("num_bytes", rows).sum(dtype="int64"))),
        )


class Evictor:
    """Plans with the level index and removes in Redis. One enforcement serves all pushes that wait for one.

    Args:
        context: Redis and settings.
        view: the index.
        lineages: for policy ages.
        run: where the trainer stands.
    """

    def __init__(self, context: Context, view: IndexView, lineages: Lineages, run: RunControl) -> None:
        self._context = context
        self._view = view
        self._lineages = lineages
        self._run = run
        self._settings = BoundSettings.of(context.recipe)
        self._bounds = Bounds(self._settings)
        share = context.recipe.buffer.near_duplicate_share
        self._near = None if share is None else NearDuplicates(context, share)
        self._enforcing = Coalesced(self._enforce, context.mutating)
        self._kept = _Amount()
        """What the last enforcement left."""
        self._noted = _Amount()
        """What was pushed since it began."""
        self._last_number: int | None = None

    def note(self, num_new: int, num_bytes: int) -> bool:
        """Count what a push or a score has added; whether a bound may be exceeded now, so that `enforce` must run.

        The count may be too high until the next enforcement (a push may be in the index before it is noted), never
        too low.
        """
        self._noted += _Amount(num_new, num_bytes)
        amount, settings = self._kept + self._noted, self._settings
        if amount.num_rollouts > settings.max_rollouts or amount.num_bytes > settings.max_bytes:
            return True
        # a score alone makes a rollout comparable
        return self._near is not None or (settings.looks_at_every_push and num_new > 0)

    def note_step(self, now: PolicyVersion) -> bool:
        """The trainer stands at `now`; whether something may be too old, so that `enforce` must run."""
        return self._bounds.age_is_due(now)

    async def enforce(self) -> None:
        """Evict until everything that was stored before the call is within the bounds.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
        """
        await self._enforcing.run()

    async def _enforce(self) -> None:
        before = self._noted  # all of it is in the index once that is level; what comes later may be or not
        now = await self._now()
        compared = await self._view.level()
        near = NONE if self._near is None else await self._near.find(compared)
        index = await self._view.level()
        if index is not compared:  # Redis lost data meanwhile: these positions are of other rollouts now, or of none
            near = NONE
        stored = _Amount(index.num_live, index.payload_bytes)
        try:
            rows = index.rows_at(near.astype("<u8"))  # positions hold when rows are numbered anew
            accepted_by = self._context.losses.accepted_by
            plan = self._bounds.plan(index, self._lineages.tree, now, rows[rows >= 0])
            victims = [
                Victims.of(index, reason, rows[first : first + ROLLOUTS_PER_CALL], accepted_by=accepted_by)
                for reason, rows in plan
                for first in range(0, len(rows), ROLLOUTS_PER_CALL)
            ]
            # Up to here nothing was awaited since the plan: rows are numbered anew when the index goes on.
            self._kept = stored - sum((part.amount for part in victims), _Amount())
            self._noted -= before
            for part in victims:
                await self._evict(part)
        except BaseException:
            self._bounds, self._kept = Bounds(self._settings), stored  # what was planned may not have been done
            if self._near is not None:
                self._near.forget_comparisons()
            raise

    async def _now(self) -> PolicyVersion | None:
        """Where the trainer stands, if an age limit asks for it and all of that can be read."""
        if self._settings.max_policy_age_steps is None:
            return None
        fields = await self._run.read()
        if fields.lineage and not self._lineages.knows(fields.lineage):
            await self._lineages.load()
        if self._context.unreadable.problem is not None:
            return None  # a damaged lineage or step reads as 0, where every rollout would be too old
        return PolicyVersion(fields.lineage, fields.step)

    async def _evict(self, victims: Victims) -> None:
        context, keys = self._context, self._context.keys
        if self._last_number is None:
            with redis_errors("read the number of the last eviction"):
                raw = await context.redis.hget(keys.counters, "evicted_number")
            self._last_number = context.read_or_note("counter", "evicted_number", lambda: int(raw or 0)) or 0
        self._last_number += 1
        reply = await context.scripts.run(
            "evict",
            [
                keys.payloads,
                keys.log,
                keys.counters,
                keys.originals,
                keys.replica,
                keys.gone,
                keys.gone_before,
                keys.run,
            ],
            [
                context.replica.number,
                self._last_number,
                victims.reason,
                victims.rollout_ids,
                victims.positions,
                victims.accepted_by,
                *(part for pair in victims.num_by_length.items() for part in pair),
            ],
        )
        if reply == replica.SUPERSEDED:
            raise await replica.refusal(context, f"the eviction of {victims.amount.num_rollouts} rollouts")
