"""The eviction policies: each one chooses rollouts to drop, all of them for one reason. No I/O.

| reason             | drops                                                                                      |
|--------------------|--------------------------------------------------------------------------------------------|
| `duplicate_tokens` | all but the newest of the rollouts of one prompt with the same response tokens             |
| `near_duplicate`   | rollouts that are nearly the same as a better one of their prompt (near_duplicates.py)     |
| `policy_age`       | rollouts older than `max_policy_age_steps` for the active lineage                          |
| `prompt_cap`       | of a prompt with more than `max_rollouts_per_prompt`: the first in the order of eviction   |
| its own            | policies from outside: `buffer.eviction_policies` (custom.py)                              |
| `max_rollouts`     | beyond the cap in items: the first in the order of eviction                                |
| `max_bytes`        | beyond the cap in bytes: the first in the order of eviction                                |

The order of eviction (`EvictionOrder`) is the order of arrival. With `lowest_reward` it is: failed rollouts, then
scored ones by ascending reward (equal rewards: the older first), then pending ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tba.versions import LineageTree, PolicyVersion
from tba_buffer.index.log import FAILED, PENDING
from tba_buffer.index.rollout_index import Index, Rows

EXACT_BELOW = 1024
SLACK = 64
MOST_SLACK_ROLLOUTS = 2048
MERGE_ABOVE = 4096
GROWTH = 8
NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


class EvictionPlan:
    """Everything that a policy may look at, and the rows that the policies before it have chosen.

    Args:
        index: level with the log.
        new_rows: live rows that no plan has seen, ascending; empty unless a policy `needs_new_rows`.
        tree: every lineage that made rollouts.
        now: where the trainer stands; None when that is not known.
        near_duplicates: rows that are near duplicates of better ones.
    """

    def __init__(
        self, index: Index, *, new_rows: Rows, tree: LineageTree, now: PolicyVersion | None, near_duplicates: Rows
    ) -> None:
        self.index = index
        self.new_rows = new_rows
        self.tree = tree
        self.now = now
        self.near_duplicates = near_duplicates
        self.chosen: list[tuple[str, Rows]] = []
        """(reason, rows) in the order of the policies; each row once, no rows empty."""
        self.dropped = NO_ROWS
        """All chosen rows, ascending."""
        self._num_bytes_dropped = 0

    @property
    def num_left(self) -> int:
        """Live rollouts without the dropped ones."""
        return self.index.num_live - len(self.dropped)

    @property
    def num_bytes_left(self) -> int:
        """Payload bytes of the live rollouts without the dropped ones."""
        return self.index.payload_bytes - self._num_bytes_dropped

    def drop(self, reason: str, rows: Rows) -> None:
        """Add the rows that no policy before has chosen."""
        rows = _without(rows, self.dropped)
        if len(rows):
            self.chosen.append((reason, rows))
            self.dropped = np.sort(np.concatenate([self.dropped, rows]))
            self._num_bytes_dropped += int(self.index.column("num_bytes", rows).sum(dtype=np.int64))


@runtime_checkable
class EvictionPolicy(Protocol):
    """Chooses stored rollouts to drop, all of them for one reason.

    A policy from outside is a subclass that the recipe names (`buffer.eviction_policies`, custom.py); one of the
    product has a line in `make_policies` (evictor.py). It may remember what it has seen: every row is in
    `EvictionPlan.new_rows` of exactly one plan, and a rebuilt index gets new policies. It runs on the event loop of the
    buffer, so every push waits for it.
    """

    reason: ClassVar[str]
    """The reason under which the log, the counters and the metrics name what this policy drops."""
    needs_new_rows: ClassVar[bool] = True
    """Whether a push can make this policy drop rollouts although it fits under both global caps."""

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the live rows to drop. Rows of `plan.dropped` among them keep their earlier reason."""
        ...

    def is_due(self, now: PolicyVersion) -> bool:
        """Return whether a trainer at `now` can make this policy drop rollouts that an earlier plan has kept."""
        return False


class EvictionOrder:
    """The order in which rollouts go when a cap is exceeded.

    Args:
        evict: `oldest`, or `lowest_reward`.
    """

    def __init__(self, evict: Literal["oldest", "lowest_reward"]) -> None:
        self._evict = evict

    def first(self, index: Index, rows: Rows, num: int) -> Rows:
        """Return the first `num` of `rows` (ascending) in the order of eviction."""
        if self._evict == "oldest":
            return rows[:num]
        status = index.column("status", rows)
        worth = np.where(status == FAILED, -np.inf, np.where(status == PENDING, np.inf, index.column("reward", rows)))
        if num < len(rows):
            # partition instead of sorting everything: O(live rollouts) for the few that go
            highest = np.partition(worth, num - 1)[num - 1]
            lower, equal = np.flatnonzero(worth < highest), np.flatnonzero(worth == highest)
            taken = np.concatenate([lower, equal[: num - len(lower)]])
            rows, worth = rows[taken], worth[taken]
        return rows[np.lexsort((rows, worth))]

    def first_left(self, plan: EvictionPlan) -> Callable[[int], Rows]:
        """Return a function: num -> the first `num` rows in the order of eviction, without the dropped ones."""
        index, dropped = plan.index, plan.dropped
        if self._evict == "oldest":
            return lambda num: _without(index.oldest_rows(num + len(dropped)), dropped)[:num]
        rows = _without(index.live_rows(), dropped)
        return lambda num: self.first(index, rows, num)

    def slack(self, num_rows: int, cap: int) -> int:
        """Return how far below a `cap` (in any unit) over `num_rows` rows an enforcement goes.

        One enforcement then serves many pushes, which otherwise would each wait for one, and with `lowest_reward` for
        a look at all rewards.
        """
        if num_rows < EXACT_BELOW:
            return 0
        share = 1 / SLACK
        if self._evict == "oldest":
            # there are no rewards to look at, so a small step is cheap and no push waits long for it
            share = min(share, MOST_SLACK_ROLLOUTS / num_rows)
        return int(share * cap)


class NearDuplicate(EvictionPolicy):
    """Drops the near duplicates that the evictor has found: finding them needs tokens, which only Redis has."""

    reason = "near_duplicate"
    needs_new_rows = False

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the rows that were found."""
        return plan.near_duplicates


class PromptCap(EvictionPolicy):
    """Keeps at most `cap` rollouts of every prompt."""

    reason = "prompt_cap"

    def __init__(self, cap: int, order: EvictionOrder) -> None:
        self._cap, self._order = cap, order

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the rows above the cap, of the prompts that have new rows."""
        index, cap, over = plan.index, self._cap, []
        for prompt in np.unique(index.column("prompt", plan.new_rows)):
            if index.live_counts[prompt] > cap:
                rows = index.prompt_rows(int(prompt), scored_only=False)
                # `live_counts` still holds the rows that earlier policies drop
                rows = np.setdiff1d(rows, plan.dropped, assume_unique=True)
                if len(rows) > cap:
                    over.append(self._order.first(index, rows, len(rows) - cap + self._order.slack(len(rows), cap)))
        return np.sort(np.concatenate(over)) if over else NO_ROWS


class MaxRollouts(EvictionPolicy):
    """Keeps at most `cap` rollouts."""

    reason = "max_rollouts"
    needs_new_rows = False

    def __init__(self, cap: int, order: EvictionOrder) -> None:
        self._cap, self._order = cap, order

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the rows above the cap."""
        num_left, cap = plan.num_left, self._cap
        if num_left <= cap:
            return NO_ROWS
        return self._order.first_left(plan)(num_left - cap + self._order.slack(num_left, cap))


class MaxBytes(EvictionPolicy):
    """Keeps at most `cap` bytes of payloads."""

    reason = "max_bytes"
    needs_new_rows = False

    def __init__(self, cap: int, order: EvictionOrder) -> None:
        self._cap, self._order = cap, order

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the rows that free the bytes above the cap."""
        num_left, num_bytes, cap = plan.num_left, plan.num_bytes_left, self._cap
        if num_bytes <= cap:
            return NO_ROWS
        too_much = num_bytes - cap + self._order.slack(num_left, cap)
        first = self._order.first_left(plan)
        # sizes differ: guess a number of rows by the mean size, and double it until they free enough
        num = min(num_left, 16 + int(1.2 * too_much * num_left / num_bytes))
        while True:
            rows = first(num)
            freed = np.cumsum(plan.index.column("num_bytes", rows), dtype=np.int64)
            if freed[-1] >= too_much or num == num_left:
                return rows[: int(np.searchsorted(freed, too_much)) + 1]
            num = min(num_left, 2 * num)


class PolicyAge(EvictionPolicy):
    """Drops rollouts that have become too old. While nothing is due, a plan looks at the new rollouts only.

    Args:
        max_age_steps: in optimizer steps.
    """

    reason = "policy_age"

    def __init__(self, max_age_steps: int) -> None:
        self._max_age_steps = max_age_steps
        self._lineage = -1
        self._due_step = 0
        """While the trainer is of this lineage and before this step, nothing that was seen is too old."""

    def is_due(self, now: PolicyVersion) -> bool:
        """Return whether something that was seen may be too old for a trainer at `now`."""
        return now.lineage != self._lineage or now.step >= self._due_step

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the live rows above the limit; none when it is not known where the trainer stands."""
        index, new, now, limit = plan.index, plan.new_rows, plan.now, self._max_age_steps
        if now is None:
            return NO_ROWS
        # of another lineage, or at the step when seen rollouts become too old: look at everything again
        if full := self.is_due(now):
            self._lineage, self._due_step = now.lineage, now.step + limit + 1
            versions = list(index.versions())
        else:
            pairs = zip(index.column("lineage", new).tolist(), index.column("step", new).tolist(), strict=True)
            versions = [PolicyVersion(lineage, step) for lineage, step in set(pairs)]
        ages = {version: plan.tree.policy_age(version, now) for version in versions}
        old = [version for version, age in ages.items() if age > limit]
        self._due_step = min([self._due_step, *(now.step + limit - age + 1 for age in ages.values() if age <= limit)])
        if not old:
            return NO_ROWS
        looked_at = index.live_rows() if full else new
        lineages, steps = index.column("lineage", looked_at), index.column("step", looked_at)
        chosen = np.logical_or.reduce([(lineages == version.lineage) & (steps == version.step) for version in old])
        return looked_at[chosen]


_MIX = np.uint64(0x9E3779B97F4A7C15)
Keys = NDArray[np.uint64]


class DuplicateTokens(EvictionPolicy):
    """Drops rollouts that a newer one with the same prompt and response tokens replaces.

    It remembers the newest rollout of every (prompt, response tokens) in 16 bytes, in two sorted levels: a small one
    takes the new rollouts, and is merged into the large one of n keys when it has grown to GROWTH sqrt(n). So a look-up
    is two binary searches, and adding a push of 64 copies some 16 sqrt(n) keys in all, however many rollouts one prompt
    has.
    """

    reason = "duplicate_tokens"

    def __init__(self) -> None:
        self._large = _SortedKeys()
        self._small = _SortedKeys()

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the live rows that the new rows replace."""
        index, new = plan.index, plan.new_rows
        hashes = index.column("token_hash", new)
        # 0 means not hashed
        new, hashes = new[hashes != 0], hashes[hashes != 0]
        if not len(new):
            return new
        # 64 bits for both: among a million answers, two share a key by chance with a probability of 3e-8
        keys = (index.column("prompt", new).astype(np.uint64) + np.uint64(1)) * _MIX ^ hashes
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], new[order]
        # the sort is stable and rows ascend, so the last of equal keys is the newest
        newest = np.append(keys[1:] != keys[:-1], True)
        gone = [rows[~newest]]
        keys, rows = keys[newest], rows[newest]
        for level in (self._small, self._large):
            old = index.rows_at(level.find(keys))
            gone.append(old[old >= 0])
        self._small = self._small.with_newer(keys, index.column("position", rows))
        if len(self._small.keys) > max(MERGE_ABOVE, GROWTH * math.isqrt(len(self._large.keys))):
            self._large = self._large.with_newer(self._small.keys, self._small.positions)
            self._small = _SortedKeys()
            if len(self._large.keys) > 2 * index.num_live:  # evicted rollouts make up half: forget them
                self._large = self._large.only(index.column("position", index.live_rows()))
        return np.unique(np.concatenate(gone))


class _SortedKeys:
    """Sorted keys [N], each once, and the position of each [N]."""

    def __init__(self, keys: Keys | None = None, positions: Keys | None = None) -> None:
        self.keys = np.zeros(0, dtype=np.uint64) if keys is None else keys
        self.positions = np.zeros(0, dtype=np.uint64) if positions is None else positions

    def find(self, keys: Keys) -> Keys:
        """Return the position of each key; 0, which no rollout has, where the key is unknown."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.uint64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.positions[at], np.uint64(0))

    def with_newer(self, keys: Keys, positions: Keys) -> _SortedKeys:
        """Return these keys merged with sorted `keys`; where both have a key, the new position holds."""
        at = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), dtype=np.bool_)
        inside = at < len(self.keys)
        known[inside] = self.keys[at[inside]] == keys[inside]
        positions, own = positions.astype(np.uint64), self.positions.copy()
        own[at[known]] = positions[known]
        return _SortedKeys(
            np.insert(self.keys, at[~known], keys[~known]), np.insert(own, at[~known], positions[~known])
        )

    def only(self, positions: Keys) -> _SortedKeys:
        """Return the keys that have one of `positions`."""
        kept = np.isin(self.positions, positions)
        return _SortedKeys(self.keys[kept], self.positions[kept])


def _without(rows: Rows, dropped: Rows) -> Rows:
    """Return the `rows` that are not in `dropped`, in their order."""
    return rows[~np.isin(rows, dropped, assume_unique=True)] if len(dropped) else rows
