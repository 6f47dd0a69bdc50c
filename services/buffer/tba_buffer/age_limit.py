"""Which stored rollouts are too old for the living lineage."""

from __future__ import annotations

import numpy as np

from tba.versions import LineageTree, PolicyVersion
from tba_buffer.index import Index, Rows

NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


class AgeLimit:
    """Finds rollouts that have become too old; a plan for which nothing is due looks at the new rollouts only.

    Args:
        max_age_steps: in optimizer steps; None: no limit.
    """

    def __init__(self, max_age_steps: int | None) -> None:
        self._max_age_steps = max_age_steps
        self._lineage = -1
        self._due_step = 0
        """While the trainer is of this lineage and before this step, nothing that was seen is too old."""

    def is_due(self, now: PolicyVersion) -> bool:
        """Whether something that was seen may be too old for a trainer at `now`."""
        return self._max_age_steps is not None and (now.lineage != self._lineage or now.step >= self._due_step)

    def too_old(self, index: Index, new: Rows, tree: LineageTree, now: PolicyVersion) -> Rows:
        """Live rows above the limit for a trainer at `now`; `new` are those that no call has seen."""
        limit = self._max_age_steps
        if limit is None:
            return NO_ROWS
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
