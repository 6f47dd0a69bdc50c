"""Keep the stored rollouts within the limits of the recipe. Every eviction is in the log, and counted.

EvictionPlanner  chooses the rollouts to evict, and the reasons (policies.py). No I/O
Evictor          catches the index up, lets the planner choose, and deletes in Redis
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tba.concurrency import SingleFlight
from tba.versions import PolicyVersion
from tba_buffer.eviction.near_duplicates import NO_POSITIONS, NearDuplicateSearch
from tba_buffer.eviction.policies import EvictionPlanner
from tba_buffer.index.log_follower import IndexView
from tba_buffer.run.lineage import Lineages
from tba_buffer.run.state import RunStateReader
from tba_buffer.storage.context import Context, needed
from tba_buffer.storage.redis_client import redis_errors

ROLLOUTS_PER_CALL = 500
Amount = NDArray[np.int64]
"""Number of rollouts, and of their payload bytes. [2]"""


class Evictor:
    """Evicts rollouts until the buffer is within its limits. Concurrent pushes share one enforcement."""

    def __init__(self, context: Context, view: IndexView, lineages: Lineages, run_state: RunStateReader) -> None:
        self._context = context
        self._view = view
        self._lineages = lineages
        self._run_state = run_state
        self._settings = context.recipe.buffer
        self._planner = EvictionPlanner(self._settings)
        share = self._settings.near_duplicate_share
        self._near_duplicates = None if share is None else NearDuplicateSearch(context, share)
        self._enforcement = SingleFlight(self._enforce, context.mutation_lock)
        self._most: Amount = np.array([self._settings.max_rollouts, self._settings.max_bytes])
        self._kept: Amount = np.zeros(2, dtype=np.int64)
        """The rollouts and bytes that the last enforcement left."""
        self._added: Amount = np.zeros(2, dtype=np.int64)
        """The rollouts and bytes that were pushed since that enforcement began."""
        self._last_number: int | None = None

    def record_added(self, num_new: int, num_bytes: int) -> bool:
        """Count rollouts and bytes that a push or a score has added. Return whether `enforce` must run.

        The count may be too high until the next enforcement, because a push may be in the index before it is counted
        here. It is never too low.
        """
        self._added = self._added + np.array([num_new, num_bytes])
        if (self._kept + self._added > self._most).any():
            return True
        # near duplicates are looked for even without new rollouts: a score makes a pending one comparable
        return self._near_duplicates is not None or (self._planner.needs_new_rows and num_new > 0)

    def record_step(self, now: PolicyVersion) -> bool:
        """Return whether `enforce` must run, because rollouts may be too old now that the trainer has acked `now`."""
        return self._planner.ages is not None and self._planner.ages.is_due(now)

    async def enforce(self) -> None:
        """Evict until everything that was stored before the call is within the limits.

        Raises:
            SupersededError: a newer buffer process owns the run.
        """
        await self._enforcement.run()

    async def _enforce(self) -> None:
        before = self._added  # all of it is in the index once that is level; later pushes may be in it or not
        now = None
        if self._settings.max_policy_age_steps is not None:
            fields = await self._run_state.read_fields()
            if fields.lineage and not self._lineages.knows(fields.lineage):
                await self._lineages.load()
            now = PolicyVersion(fields.lineage, fields.step)
        compared = await self._view.catch_up()
        near = NO_POSITIONS if self._near_duplicates is None else await self._near_duplicates.find(compared)
        index = await self._view.catch_up()
        if index is not compared:  # Redis lost data meanwhile: these positions are of other rollouts now, or of none
            near = NO_POSITIONS
        stored: Amount = np.array([index.num_live, index.payload_bytes])
        try:
            rows = index.rows_at(near.astype("<u8"))  # rows may have other numbers by now; positions stay
            plan = self._planner.plan(index, self._lineages.tree, now, rows[rows >= 0])
            calls: list[dict[str, str | bytes]] = []
            for reason, rows in plan:
                for first in range(0, len(rows), ROLLOUTS_PER_CALL):
                    part = rows[first : first + ROLLOUTS_PER_CALL]
                    calls.append(
                        {
                            "reason": reason,
                            "ids": b"".join(index.rollout_ids(part)),
                            "positions": index.column("position", part).astype("<u8").tobytes(),
                            # the last acceptance of a loss when this was planned
                            "accepted_by": self._context.losses.accepted_by,
                        }
                    )
            # nothing may be awaited between the plan and here: rows get other numbers when the index moves on
            sizes = [index.column("num_bytes", rows) for _, rows in plan]
            self._kept = stored - sum(np.array([len(each), each.sum(dtype=np.int64)]) for each in sizes)
            self._added = self._added - before
            if calls and self._last_number is None:
                counters = self._context.keys.counters
                with redis_errors("read the number of the last eviction"):
                    raw = await self._context.redis.hget(counters, "evicted_number")
                self._last_number = needed(counters, "evicted_number", lambda: int(raw or 0))
            for arguments in calls:
                # numbered: a repeated call of the script is known by its number, and counts nothing twice
                self._last_number = (self._last_number or 0) + 1
                await self._context.scripts.run("evict", number=self._last_number, **arguments)
        except BaseException:
            # the planner counts its plan as done, and some of it may not have been: plan everything again
            self._planner, self._kept = EvictionPlanner(self._settings), stored
            if self._near_duplicates is not None:
                self._near_duplicates.compared.clear()
            raise
