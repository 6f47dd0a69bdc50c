"""The in-memory view of the log that batches are drawn from. A function of the log alone: a restart rebuilds it.

Rows are numbered in log order and never renumbered; row r of the stored arrays is `r - self._base`. Eviction moves the
first live row forward. A prompt's rows are the scored ones, ascending.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from tba.versions import PolicyVersion
from tba_buffer.log import RECORD_DTYPE, SCORED, Event, Evicted, Mark, RolloutsAdded

COMPACT_ROWS = 65_536
Rows = NDArray[np.int64]


class LogGapError(Exception):
    """The log does not continue where the view ends: Redis lost or replaced data, so the view must be rebuilt."""


class Index:
    """Live rollouts and marks at one log position.

    Args:
        num_marks_kept: the newest marks that count for what is recent (>= 2).
    """

    def __init__(self, num_marks_kept: int) -> None:
        self._num_marks_kept = num_marks_kept
        self.position = 0
        self.first_live = 1
        self.marks: list[Mark] = []
        self._base = 0
        self._first_row = 0
        self._records = np.zeros(1024, dtype=RECORD_DTYPE)
        self._positions = np.zeros(1024, dtype=np.int64)
        self._end_row = 0
        self._rows_of: dict[int, array[int]] = {}
        self.counts = np.zeros(0, dtype=np.int64)

    # ---- building the view ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Advance the view by one event.

        Raises:
            LogGapError: the event is not the next one. A fresh view accepts any first event: the log may be cut.
        """
        first = event.first_position if isinstance(event, RolloutsAdded) else event.position
        if first != self.position + 1 and self.position:
            raise LogGapError(f"the log continues at {first}, the view ends at {self.position}")
        if isinstance(event, RolloutsAdded):
            self._add(event)
            self.position = first + len(event.records) - 1
        elif isinstance(event, Mark):
            self._keep_marks([*self.marks, event])
            self.position = event.position
        else:
            self._evict(event)
            self.position = event.position

    def _add(self, event: RolloutsAdded) -> None:
        num, at = len(event.records), self._end_row - self._base
        if at + num > len(self._records):
            size = max(2 * len(self._records), at + num)
            self._records = np.concatenate([self._records, np.zeros(size - len(self._records), dtype=RECORD_DTYPE)])
            self._positions = np.concatenate([self._positions, np.zeros(size - len(self._positions), dtype=np.int64)])
        self._records[at : at + num] = event.records
        self._positions[at : at + num] = event.first_position + np.arange(num)
        for offset in np.flatnonzero(event.records["status"] == SCORED):
            prompt = int(event.records["prompt"][offset])
            self._rows_of.setdefault(prompt, array("q")).append(self._end_row + int(offset))
            if prompt >= len(self.counts):
                self.counts = np.concatenate([self.counts, np.zeros(prompt + 1, dtype=np.int64)])
            self.counts[prompt] += 1
        self._end_row += num

    def _evict(self, event: Evicted) -> None:
        self._keep_marks(list(event.marks))
        self.first_live = event.first_live
        live = self._positions[self._first_row - self._base : self._end_row - self._base]
        first_row = self._first_row + int(np.searchsorted(live, event.first_live))
        gone = self._records[self._first_row - self._base : first_row - self._base]
        for prompt, num in zip(*np.unique(gone["prompt"][gone["status"] == SCORED], return_counts=True), strict=True):
            self.counts[prompt] -= num
            rows = self._rows_of[int(prompt)]
            if not self.counts[prompt]:
                del self._rows_of[int(prompt)]
            elif len(rows) > 2 * self.counts[prompt] + 16:
                del rows[: len(rows) - int(self.counts[prompt])]
        self._first_row = first_row
        dead = self._first_row - self._base
        if dead > COMPACT_ROWS and 2 * dead > self._end_row - self._base:
            self._records = self._records[dead:].copy()
            self._positions = self._positions[dead:].copy()
            self._base = self._first_row

    def _keep_marks(self, marks: list[Mark]) -> None:
        self.marks = marks[-self._num_marks_kept :]

    # ---- reading it -------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Stored rollouts, whatever their status."""
        return self._end_row - self._first_row

    @property
    def num_scored(self) -> int:
        """Stored rollouts that batches may hold."""
        return int(self.counts.sum())

    def rows(self, prompt: int) -> Rows:
        """Live scored rows of one prompt, ascending."""
        rows = self._rows_of.get(prompt)
        if rows is None:
            return np.zeros(0, dtype=np.int64)
        return np.array(rows[len(rows) - int(self.counts[prompt]) :], dtype=np.int64)

    def rewards(self, rows: Rows) -> NDArray[np.float64]:
        """Rewards of rows."""
        return self._records["reward"][rows - self._base]

    def rollout_ids(self, rows: Rows) -> list[bytes]:
        """16-byte ids of rows."""
        return [self._records["rollout_id"][row - self._base].tobytes() for row in rows]

    def recent_rows(self, window: str, num_versions: int) -> tuple[Rows, NDArray[np.int64]]:
        """Live scored rows that are recent, ascending, and the prompt of each.

        `arrival`: after the mark before the newest one; before a second mark, all. `version`: made by one of the
        versions of the last `num_versions` marks; before any mark, all.
        """
        low, high = self._first_row - self._base, self._end_row - self._base
        if window == "arrival":
            after = self.marks[-2].position if len(self.marks) > 1 else 0
            low += int(np.searchsorted(self._positions[low:high], after, side="right"))
        records = self._records[low:high]
        chosen = records["status"] == SCORED
        if window == "version" and self.marks:
            versions = _last_versions(self.marks, num_versions)
            made_by = [(records["lineage"] == v.lineage) & (records["step"] == v.step) for v in versions]
            chosen &= np.logical_or.reduce(made_by)
        offsets = np.flatnonzero(chosen)
        return offsets + (low + self._base), records["prompt"][offsets].astype(np.int64)

    def fingerprint(self) -> tuple[object, ...]:
        """Everything the view knows, comparable between two processes that read the same log."""
        live = slice(self._first_row - self._base, self._end_row - self._base)
        per_prompt = {
            prompt: tuple(self._positions[self.rows(prompt) - self._base].tolist()) for prompt in sorted(self._rows_of)
        }
        return (
            self.position,
            self.first_live,
            tuple(self.marks),
            self._records[live].tobytes(),
            self._positions[live].tobytes(),
            per_prompt,
        )


def _last_versions(marks: list[Mark], num_versions: int) -> list[PolicyVersion]:
    newest_first = dict.fromkeys(mark.version for mark in reversed(marks))
    return list(newest_first)[:num_versions]
