"""Which rollouts must go, and why: the caps and the age limit of a recipe, as a plan over the index. No I/O.

A rollout goes for one reason, the first of REASONS that applies:

| reason           | goes                                                                                         |
|------------------|----------------------------------------------------------------------------------------------|
| duplicate_tokens | all but the newest of the rollouts of one prompt with the same response tokens               |
| near_duplicate   | what is nearly the same as a better one of its prompt (near_duplicates.py)                   |
| policy_age       | whatever is older than `max_policy_age_steps` for the living lineage                         |
| prompt_cap       | of a prompt with more than `max_rollouts_per_prompt`: the first in the order of eviction     |
| max_rollouts     | beyond the cap in items: the first in the order of eviction                                  |
| max_bytes        | beyond the cap in bytes: the same                                                            |

The order of eviction is that of arrival, or with `lowest_reward`: failed ones, then scored ones by ascending reward
(equal rewards: the older first), then those that still wait for a score.

A cap over EXACT_BELOW rollouts or more is undercut when it is enforced, by one part in SLACK: one enforcement then
serves many pushes, which else would each wait for one, and with `lowest_reward` for a look at all rewards. In the order
of arrival, where there is nothing to look at, by at most MOST_SLACK_ROLLOUTS: whoever waits for it waits shortly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe
from tba.versions import LineageTree, PolicyVersion
from tba_buffer.age_limit import AgeLimit
from tba_buffer.duplicates import Duplicates
from tba_buffer.index import Index, Rows
from tba_buffer.log import FAILED, PENDING

REASONS = ("duplicate_tokens", "near_duplicate", "policy_age", "prompt_cap", "max_rollouts", "max_bytes")
EXACT_BELOW = 1024
SLACK = 64
MOST_SLACK_ROLLOUTS = 2048
SHORTEST_BUCKET_TOKENS = 16
_BUCKET_ENDS = SHORTEST_BUCKET_TOKENS << np.arange(29, dtype=np.int64)
Plan = list[tuple[str, Rows]]
NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class BoundSettings:
    """The bounds of a recipe's `[buffer]` section."""

    max_rollouts: int
    max_bytes: int
    max_rollouts_per_prompt: int | None = None
    max_policy_age_steps: int | None = None
    evict: Literal["oldest", "lowest_reward"] = "oldest"
    deduplicate: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> BoundSettings:
        """The bounds that a recipe asks for."""
        return cls(**{name: getattr(recipe.buffer, name) for name in cls.__slots__})

    @property
    def looks_at_every_push(self) -> bool:
        """Whether even a push that fits under both global caps may make something go."""
        return self.deduplicate or self.max_rollouts_per_prompt is not None or self.max_policy_age_steps is not None


def length_bucket(num_tokens: int) -> str:
    """The range of response lengths, in tokens, that `num_tokens` counts under: "1-16", "17-32", "33-64", ..."""
    high = max(SHORTEST_BUCKET_TOKENS, 1 << max(0, num_tokens - 1).bit_length())
    return f"{1 if high == SHORTEST_BUCKET_TOKENS else high // 2 + 1}-{high}"


def count_by_length(num_tokens: NDArray[np.integer]) -> dict[str, int]:
    """Length bucket -> how many of `num_tokens` [n] it holds."""
    numbers, counts = np.unique(np.searchsorted(_BUCKET_ENDS, num_tokens), return_counts=True)
    return {length_bucket(int(_BUCKET_ENDS[number])): int(count) for number, count in zip(numbers, counts, strict=True)}


class Bounds:
    """Plans evictions; remembers what it has seen, so that a plan costs what is new and what goes.

    Args:
        settings: the bounds.
    """

    def __init__(self, settings: BoundSettings) -> None:
        self._settings = settings
        self._index: Index | None = None
        self._duplicates = Duplicates()
        self._age = AgeLimit(settings.max_policy_age_steps)
        self._seen_position = 0

    def plan(self, index: Index, tree: LineageTree, now: PolicyVersion | None, near: Rows = NO_ROWS) -> Plan:
        """(reason, rows) of everything that must go, in the order of REASONS; empty when nothing must.

        Args:
            index: level with the log.
            tree: every lineage that made rollouts.
            now: where the trainer stands; None when that is not known, and no age is looked at.
            near: rows that are near duplicates of others.
        """
        settings = self._settings
        new = self._new_rows(index)
        chosen = _Chosen(index)
        if settings.deduplicate:
            chosen.add("duplicate_tokens", self._duplicates.replaced(index, new))
        chosen.add("near_duplicate", near)
        if now is not None:
            chosen.add("policy_age", self._age.too_old(index, new, tree, now))
        if settings.max_rollouts_per_prompt is not None:
            chosen.add("prompt_cap", self._over_prompt_cap(index, new, chosen.rows, settings.max_rollouts_per_prompt))
        if index.num_live - len(chosen.rows) > settings.max_rollouts:
            chosen.add("max_rollouts", self._over_max_rollouts(index, chosen.rows))
        if index.payload_bytes - chosen.num_bytes > settings.max_bytes:
            chosen.add("max_bytes", self._over_max_bytes(index, chosen.rows, index.payload_bytes - chosen.num_bytes))
        return chosen.plan

    def age_is_due(self, now: PolicyVersion) -> bool:
        """Whether something that was seen may be too old for a trainer at `now`."""
        return self._age.is_due(now)

    def _new_rows(self, index: Index) -> Rows:
        """Rows that no plan has seen."""
        if index is not self._index:
            self._index, self._seen_position = index, 0
            self._duplicates, self._age = Duplicates(), AgeLimit(self._settings.max_policy_age_steps)
        if not self._settings.looks_at_every_push:
            return NO_ROWS
        rows = index.live_rows(newest=min(index.num_live, index.position - self._seen_position))
        new = rows[index.column("position", rows) > self._seen_position]
        self._seen_position = index.position
        return new

    def _over_prompt_cap(self, index: Index, new: Rows, gone: Rows, cap: int) -> Rows:
        over = []
        for prompt in np.unique(index.column("prompt", new)):
            if index.live_counts[prompt] > cap:
                rows = np.setdiff1d(index.prompt_rows(int(prompt), scored_only=False), gone, assume_unique=True)
                if len(rows) > cap:
                    over.append(self._first(index, rows, len(rows) - cap + self._slack(len(rows), cap)))
        return np.sort(np.concatenate(over)) if over else NO_ROWS

    def _over_max_rollouts(self, index: Index, gone: Rows) -> Rows:
        num_left, cap = index.num_live - len(gone), self._settings.max_rollouts
        return self._next(index, gone)(num_left - cap + self._slack(num_left, cap))

    def _over_max_bytes(self, index: Index, gone: Rows, num_bytes: int) -> Rows:
        num_left, cap = index.num_live - len(gone), self._settings.max_bytes
        too_much = num_bytes - cap + self._slack(num_left, cap)
        first = self._next(index, gone)
        num = min(num_left, 16 + int(1.2 * too_much * num_left / num_bytes))
        while True:
            rows = first(num)
            freed = np.cumsum(index.column("num_bytes", rows), dtype=np.int64)
            if freed[-1] >= too_much or num == num_left:
                return rows[: int(np.searchsorted(freed, too_much)) + 1]
            num = min(num_left, 2 * num)

    def _next(self, index: Index, gone: Rows) -> Callable[[int], Rows]:
        """num -> the first `num` rows in the order of eviction, without those that are `gone` anyway."""
        if self._settings.evict == "oldest":
            return lambda num: _without(index.oldest_rows(num + len(gone)), gone)[:num]
        rows = _without(index.live_rows(), gone)
        return lambda num: self._first(index, rows, num)

    def _first(self, index: Index, rows: Rows, num: int) -> Rows:
        """The first `num` of `rows` (ascending) in the order of eviction."""
        if self._settings.evict == "oldest":
            return rows[:num]
        status = index.column("status", rows)
        worth = np.where(status == FAILED, -np.inf, np.where(status == PENDING, np.inf, index.column("reward", rows)))
        if num < len(rows):
            highest = np.partition(worth, num - 1)[num - 1]
            lower, equal = np.flatnonzero(worth < highest), np.flatnonzero(worth == highest)
            taken = np.concatenate([lower, equal[: num - len(lower)]])
            rows, worth = rows[taken], worth[taken]
        return rows[np.lexsort((rows, worth))]

    def _slack(self, num_rows: int, cap: int) -> int:
        """How far below a `cap` (in any unit) over `num_rows` rows an enforcement goes."""
        if num_rows < EXACT_BELOW:
            return 0
        share = 1 / SLACK
        if self._settings.evict == "oldest":
            share = min(share, MOST_SLACK_ROLLOUTS / num_rows)
        return int(share * cap)


class _Chosen:
    """Collects what goes, each row once."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.plan: Plan = []
        self.rows = NO_ROWS
        """All rows so far, ascending."""
        self.num_bytes = 0

    def add(self, reason: str, rows: Rows) -> None:
        rows = _without(rows, self.rows)
        if len(rows):
            self.plan.append((reason, rows))
            self.rows = np.sort(np.concatenate([self.rows, rows]))
            self.num_bytes += int(self._index.column("num_bytes", rows).sum(dtype=np.int64))


def _without(rows: Rows, gone: Rows) -> Rows:
    """`rows` that are not in `gone`, in their order."""
    return rows[~np.isin(rows, gone, assume_unique=True)] if len(gone) else rows
