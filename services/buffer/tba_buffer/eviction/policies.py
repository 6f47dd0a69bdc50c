"""Choose the rollouts to evict, each for one reason. No I/O.

| reason             | drops                                                                                      |
|--------------------|--------------------------------------------------------------------------------------------|
| `duplicate_tokens` | all but the newest of the rollouts of one prompt with the same sampled tokens              |
| `near_duplicate`   | rollouts that are nearly the same as a better one of their prompt (near_duplicates.py)     |
| `policy_age`       | rollouts older than `max_policy_age_steps` for the active lineage                          |
| `prompt_cap`       | of a prompt with more than `max_rollouts_per_prompt`: the oldest                           |
| `max_rollouts`     | beyond the cap in items: the oldest                                                        |
| `max_bytes`        | beyond the cap in bytes: the oldest                                                        |

The reasons are checked in this order, and a rollout is evicted for the first one that applies to it. The caps are last:
they count only the rollouts that the other reasons have left.
"""

from __future__ import annotations

import numpy as np

from tba.config.sections import BufferSection
from tba.versions import LineageTree, PolicyVersion
from tba_buffer.index.rollout_index import Index, Rows

EXACT_BELOW = 1024
SLACK = 64
MOST_SLACK_ROLLOUTS = 2048
NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


class EvictionPlanner:
    """Plans evictions. It remembers the rollouts it has seen, so a plan costs time only for new and evicted ones.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: BufferSection) -> None:
        self._settings = settings
        self._index: Index | None = None
        self._forget()

    def _forget(self) -> None:
        settings = self._settings
        self._seen_position = 0
        self._duplicates = _DuplicateTokens() if settings.deduplicate else None
        age_limit = settings.max_policy_age_steps
        self.ages = None if age_limit is None else _PolicyAge(age_limit)

    @property
    def needs_new_rows(self) -> bool:
        """Whether a push that fits under both global caps may still cause an eviction."""
        settings = self._settings
        limits = (settings.max_rollouts_per_prompt, settings.max_policy_age_steps)
        return settings.deduplicate or any(limit is not None for limit in limits)

    def plan(
        self, index: Index, tree: LineageTree, now: PolicyVersion | None, near_duplicates: Rows = NO_ROWS
    ) -> list[tuple[str, Rows]]:
        """Return (reason, rows to evict) in the order of the module's table; [] if nothing must be evicted.

        Args:
            index: caught up with the log.
            tree: every lineage that made rollouts.
            now: active lineage and last acked step; None if unknown: then `policy_age` is not checked.
            near_duplicates: rows that are near duplicates of better ones.
        """
        if index is not self._index:  # a rebuilt index gives positions to other rollouts: nothing seen holds any more
            self._index = index
            self._forget()
        plan, cap, new = _Plan(index), self._settings.max_rollouts_per_prompt, NO_ROWS
        if self.needs_new_rows:
            rows = index.live_rows(newest=min(index.num_live, index.position - self._seen_position))
            new = rows[index.column("position", rows) > self._seen_position]
            self._seen_position = index.position
        if self._duplicates is not None:
            plan.drop("duplicate_tokens", self._duplicates.replaced(index, new))
        plan.drop("near_duplicate", near_duplicates)
        if self.ages is not None and now is not None:
            plan.drop("policy_age", self.ages.too_old(index, new, tree, now))
        if cap is not None:
            plan.drop("prompt_cap", _over_prompt_cap(plan, new, cap))
        max_rollouts = self._settings.max_rollouts
        if (too_many := plan.num_left - max_rollouts) > 0:
            plan.drop("max_rollouts", plan.oldest_left(too_many + _slack(plan.num_left, max_rollouts)))
        plan.drop("max_bytes", _over_max_bytes(plan, self._settings.max_bytes))
        if self._duplicates is not None:
            self._duplicates.remove(index, plan.dropped)
        return plan.chosen


class _Plan:
    """The rows that are chosen so far.

    Args:
        index: caught up with the log.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.chosen: list[tuple[str, Rows]] = []
        """Pairs (reason, rows); no row occurs twice, and no array of rows is empty."""
        self.dropped = NO_ROWS
        """All chosen rows, ascending."""
        self.num_left, self.num_bytes_left = index.num_live, index.payload_bytes
        """Live rollouts and their payload bytes without the dropped ones."""

    def drop(self, reason: str, rows: Rows) -> None:
        """Choose `rows` for eviction with this `reason`, except the rows that are chosen already."""
        rows = _without(rows, self.dropped)
        if len(rows):
            self.chosen.append((reason, rows))
            self.dropped = np.sort(np.concatenate([self.dropped, rows]))
            self.num_left -= len(rows)
            self.num_bytes_left -= int(self.index.column("num_bytes", rows).sum(dtype=np.int64))

    def oldest_left(self, num: int) -> Rows:
        """Return the `num` oldest live rows that are not dropped."""
        return _without(self.index.oldest_rows(num + len(self.dropped)), self.dropped)[:num]


def _slack(num_rows: int, cap: int) -> int:
    """Return how far below `cap` an enforcement evicts, in the unit of `cap`, when `num_rows` rows are stored.

    This leaves space for many pushes. Without it, each push would wait for an enforcement.
    """
    return 0 if num_rows < EXACT_BELOW else int(min(1 / SLACK, MOST_SLACK_ROLLOUTS / num_rows) * cap)


def _over_prompt_cap(plan: _Plan, new: Rows, cap: int) -> Rows:
    """Return the oldest rows above `cap`, and `_slack` more, of each prompt with rows in `new`."""
    index, over = plan.index, []
    for prompt in np.unique(index.column("prompt", new)):
        if index.live_counts[prompt] > cap:
            # `live_counts` still holds the rows that are dropped for another reason
            rows = _without(index.prompt_rows(int(prompt), scored_only=False), plan.dropped)
            if len(rows) > cap:
                over.append(rows[: len(rows) - cap + _slack(len(rows), cap)])
    return np.sort(np.concatenate(over)) if over else NO_ROWS


def _over_max_bytes(plan: _Plan, cap: int) -> Rows:
    """Return the oldest rows that free the bytes above the cap."""
    num_left, num_bytes = plan.num_left, plan.num_bytes_left
    if num_bytes <= cap:
        return NO_ROWS
    too_much = num_bytes - cap + _slack(num_left, cap)
    # sizes differ: guess a number of rows by the mean size, and double it until they free enough
    num = min(num_left, 16 + int(1.2 * too_much * num_left / num_bytes))
    while True:
        rows = plan.oldest_left(num)
        freed = np.cumsum(plan.index.column("num_bytes", rows), dtype=np.int64)
        if freed[-1] >= too_much or num == num_left:
            return rows[: int(np.searchsorted(freed, too_much)) + 1]
        num = min(num_left, 2 * num)


class _PolicyAge:
    """Finds rollouts that have become too old. While nothing is due, it looks at the new rollouts only.

    Args:
        max_age_steps: in optimizer steps.
    """

    def __init__(self, max_age_steps: int) -> None:
        self._max_age_steps = max_age_steps
        self._lineage = -1
        self._due_step = 0
        """Until the trainer has another lineage or reaches this step, no rollout seen so far is too old."""

    def is_due(self, now: PolicyVersion) -> bool:
        """Return whether rollouts seen before may be too old for a trainer at `now`."""
        return now.lineage != self._lineage or now.step >= self._due_step

    def too_old(self, index: Index, new: Rows, tree: LineageTree, now: PolicyVersion) -> Rows:
        """Return the live rows with a policy age above the limit."""
        limit = self._max_age_steps
        # of another lineage, or at the step when seen rollouts become too old: look at everything again
        if full := self.is_due(now):
            self._lineage, self._due_step = now.lineage, now.step + limit + 1
            versions = list(index.versions())
        else:
            pairs = zip(index.column("lineage", new).tolist(), index.column("step", new).tolist(), strict=True)
            versions = [PolicyVersion(lineage, step) for lineage, step in set(pairs)]
        ages = {version: tree.policy_age(version, now) for version in versions}
        old = [version for version, age in ages.items() if age > limit]
        self._due_step = min([self._due_step, *(now.step + limit - age + 1 for age in ages.values() if age <= limit)])
        if not old:
            return NO_ROWS
        looked_at = index.live_rows() if full else new
        lineages, steps = index.column("lineage", looked_at), index.column("step", looked_at)
        chosen = np.logical_or.reduce([(lineages == version.lineage) & (steps == version.step) for version in old])
        return looked_at[chosen]


class _DuplicateTokens:
    """Knows the newest live rollout of every (prompt, sampled tokens), in about 120 bytes each."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        """Key of `_keys` -> log position of the newest live rollout with this key."""

    def replaced(self, index: Index, new: Rows) -> Rows:
        """Remember the new rows. Return the older live rows with the same prompt and response tokens."""
        gone = []
        for key, position in _keys(index, new):
            if (older := self._newest.get(key)) is not None:
                gone.append(older)
            self._newest[key] = position
        rows = index.rows_at(np.array(gone, dtype=np.uint64))
        return rows[rows >= 0]

    def remove(self, index: Index, rows: Rows) -> None:
        """Forget rows that are evicted for any reason."""
        for key, position in _keys(index, rows):
            if self._newest.get(key) == position:
                del self._newest[key]


def _keys(index: Index, rows: Rows) -> list[tuple[int, int]]:
    """Return (key, log position) of each row with a token hash; the key combines its prompt and its token hash."""
    columns = [index.column(name, rows).tolist() for name in ("prompt", "token_hash", "position")]
    # 0 means not hashed
    return [(prompt << 64 | hashed, position) for prompt, hashed, position in zip(*columns, strict=True) if hashed]


def _without(rows: Rows, dropped: Rows) -> Rows:
    """Return the `rows` that are not in `dropped`, in their order."""
    return rows[~np.isin(rows, dropped, assume_unique=True)] if len(dropped) else rows
