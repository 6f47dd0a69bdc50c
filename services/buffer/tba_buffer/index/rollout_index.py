"""The in-memory view of the log that batches are drawn from. It is a function of the log, so a restart rebuilds it.

    columns         one row per rollout, in the order of the log                      (tables.py)
    rows_by_prompt  the rows of each prompt                                           (tables.py)
    counts          per prompt, per status, per policy version, kept up to date       (here)
    draws           the turns of prompts and the uses of rollouts                     (draws.py)
    trees           sum trees for draws from many rollouts, built when first asked for (reward_trees.py)

Row numbers ascend with log positions. They are valid until the next `apply`, which may renumber the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe
from tba.config.sections import SamplingSection
from tba.fields import MAX_NUMBER
from tba.versions import PolicyVersion
from tba_buffer.index.draws import RECENT, REPLAY, DrawHistory
from tba_buffer.index.log import (
    CHECKPOINT_DTYPE,
    FAILED,
    PENDING,
    RECORD_DTYPE,
    SCORED,
    Drawn,
    Event,
    Evicted,
    LogCheckpoint,
    LogGapError,
    Publication,
    Rescored,
    Resumed,
    RolloutsAdded,
    Voided,
    first_position,
)
from tba_buffer.index.reward_trees import RewardTrees
from tba_buffer.index.tables import (
    DEAD,
    Columns,
    Groups,
    PromptRows,
    Prompts,
    PromptSet,
    VersionNumbers,
    csr_indices,
    group_by,
)

Rows = NDArray[np.int64]
NUM_PUBLICATIONS_KEPT = 8
"""How many of the newest publications the index keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """The settings that the counts of the index depend on.

    Draws from a prompt with more than `big_prompt` drawable rollouts use a tree; draws from other prompts look at all
    their rollouts. Both are exact.
    """

    alternate: bool = False
    min_distinct: int = 2
    max_uses: int | None = None
    success_reward: float = 1.0
    big_prompt: int = 512

    @classmethod
    def of(cls, recipe: Recipe) -> IndexSettings:
        """Return the settings of a run."""
        sampling = recipe.sampling
        return cls(
            alternate=sampling.alternate,
            min_distinct=sampling.min_distinct,
            max_uses=sampling.max_uses,
            success_reward=recipe.eval.success_reward,
        )


class Index:
    """Live rollouts and publications at one log position."""

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        self.position = 0
        self.publications: list[Publication] = []
        self.columns = Columns()
        self.rows_by_prompt = PromptRows(self._is_live)
        self._versions = VersionNumbers()
        self.trees = self._new_trees()
        self.drawable = (PromptSet(), PromptSet())
        """Per pool (REPLAY, RECENT; draws.py): the prompts with at least min_distinct drawable rollouts in the pool."""
        self.due = (PromptSet(), PromptSet())
        """Per pool: the prompts of `drawable` that are due."""
        self.draws = DrawHistory(self._change_uses, self._note_turns)
        self.unusable: list[bytes] = []
        """Ids of rollouts that count as failed because their reward in the log is invalid; `catch_up` empties it."""
        self._recent_from = 0
        self._num_of = np.zeros(3, dtype=np.int64)
        self.num_used_up = 0
        """Number of scored rollouts that were in max_uses batches, so that no other batch may hold them."""
        self.payload_bytes = 0
        self._pending_from = 0
        self._num_prompts = 0
        self._per_prompt = np.zeros((5, 0), dtype=np.int64)

    # ---- following the log ------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Apply one event of the log.

        Raises:
            LogGapError: the event is not the next one. A fresh index accepts any first event.
        """
        self.apply_many([event])

    def apply_many(self, events: Sequence[Event]) -> None:
        """Apply several events of the log, with the same result as one after the other.

        All additions go first, as one vector operation, then draws, rewards and evictions. The result is the same,
        because the others only name rollouts that were added before them, and an evicted rollout never returns.

        Raises:
            LogGapError: an event is not the next one; then nothing is applied.
        """
        position = self.position
        for event in events:
            first = first_position(event)
            if first != position + 1 and position:
                raise LogGapError(f"the log continues at {first}, the view ends at {position}")
            position = first + len(event.records) - 1 if isinstance(event, RolloutsAdded) else first
        if added := [event for event in events if isinstance(event, RolloutsAdded)]:
            records = added[0].records
            if len(added) > 1:  # joined as bytes: much faster than concatenating thousands of structured arrays
                records = np.frombuffer(b"".join(event.records.tobytes() for event in added), dtype=RECORD_DTYPE)
            firsts = np.array([event.first_position for event in added], dtype=np.int64)
            if len(records):
                self._add(records, csr_indices(firsts, np.array([len(event.records) for event in added])))
        for event in events:
            if isinstance(event, Drawn | Voided | Resumed):
                self.draws.apply(event)
        if changes := [event.changes for event in events if isinstance(event, Rescored)]:
            self._rescore(np.concatenate(changes))
        if gone := [event.positions for event in events if isinstance(event, Evicted)]:
            self._evict(np.concatenate(gone))
        self.position = position
        if publications := [event for event in events if isinstance(event, Publication)]:
            self._set_publications([*self.publications, *publications])

    def restore(self, checkpoint: LogCheckpoint) -> None:
        """Load a checkpoint into a fresh index.

        Raises:
            ValueError: the index is not fresh.
        """
        if self.position:
            raise ValueError(f"only a fresh index can begin with a checkpoint; this one is at position {self.position}")
        if len(checkpoint.records):
            self._add(checkpoint.records, checkpoint.records["position"].astype(np.int64))
        self.position = checkpoint.position
        if checkpoint.draws:
            positions, uses = self.draws.restore(checkpoint.draws)
            # while a checkpoint is written, rollouts that it names may go
            rows = self.columns.rows_at(positions)
            self._set_uses(rows[rows >= 0], uses[rows >= 0])
        self._set_publications(list(checkpoint.publications))

    def checkpoint(self) -> LogCheckpoint:
        """Return the state as a checkpoint."""
        return LogCheckpoint(self.position, tuple(self.publications), self.records(self.live_rows()), self.pack_draws())

    def pack_draws(self) -> bytes:
        """Return the draws as a checkpoint holds them (`DrawHistory.pack`)."""
        rows = self.live_rows()
        return self.draws.pack(self.columns.get("position", rows), self.columns.get("uses", rows))

    def records(self, rows: Rows) -> NDArray[np.void]:
        """Return the records (CHECKPOINT_DTYPE) of rows [n]. [n]"""
        records = np.empty(len(rows), dtype=CHECKPOINT_DTYPE)
        for name in CHECKPOINT_DTYPE.names or ():
            records[name] = self.column(name, rows)
        return records

    def _add(self, records: NDArray[np.void], positions: NDArray[np.int64]) -> None:
        num = len(records)
        self._make_room(num)
        versions = self._versions.number_of(records["lineage"], records["step"])
        columns = {name: records[name] for name in RECORD_DTYPE.names or ()}
        # no sum of a tree may hold an unbounded reward, so such a rollout counts as failed and is reported
        if (bad := _is_unusable(records)).any():
            self.unusable += [rollout_id.tobytes() for rollout_id in records["rollout_id"][bad]]
            columns["status"] = np.where(bad, FAILED, records["status"]).astype(np.uint8)
            columns["reward"] = np.where(bad, np.nan, records["reward"])
        columns |= {"position": positions, "version": versions, "uses": np.zeros(num, dtype=np.uint16)}
        rows = self.columns.append(columns, num)
        prompts = records["prompt"]
        num_prompts = int(prompts.max()) + 1
        self._num_prompts = max(self._num_prompts, num_prompts)
        self._reserve_prompts(num_prompts)
        by_prompt = group_by(prompts)
        self._account(rows, by_prompt, 1)
        self._versions.count(versions, 1)
        self._per_prompt[1, by_prompt.keys] += by_prompt.sizes
        self.trees.note_moved(self.rows_by_prompt.append(by_prompt, rows))
        self.trees.note_added(by_prompt.keys)

    def _rescore(self, changes: NDArray[np.void]) -> None:
        # of several changes of one rollout the last one holds: reversed, it is the first that `unique` finds
        _, newest = np.unique(changes["position"][::-1], return_index=True)
        changes = changes[::-1][newest]
        rows = self.columns.rows_at(changes["position"])
        # a rollout that was evicted before its score arrived is ignored
        changes, rows = changes[rows >= 0], rows[rows >= 0]
        if not len(rows):
            return
        if (bad := _is_unusable(changes)).any():
            self.unusable += self.rollout_ids(rows[bad])
            changes = changes.copy()
            changes["status"][bad], changes["reward"][bad] = FAILED, np.nan
        by_prompt = group_by(self.columns.get("prompt", rows))
        # counted out with the old values and in with the new ones
        self._account(rows, by_prompt, -1)
        for name in ("reward", "num_bytes", "status"):
            self.columns.put(name, rows, changes[name])
        self._account(rows, by_prompt, 1)
        # one that is pending again may lie before the row where the search for pending rows begins
        if (pending := rows[changes["status"] == PENDING]).size:
            self._pending_from = min(self._pending_from, int(pending[0]))
        self.trees.note_changed(rows, by_prompt)

    def _change_uses(self, positions: NDArray[np.uint64], change: int) -> None:
        rows = self.columns.rows_at(positions)
        rows = rows[rows >= 0]
        if len(rows):
            uses = self.columns.get("uses", rows).astype(np.int64) + change
            self._set_uses(rows, np.clip(uses, 0, np.iinfo(np.uint16).max))

    def _set_uses(self, rows: Rows, uses: NDArray[np.integer]) -> None:
        if self.settings.max_uses is None or not len(rows):
            self.columns.put("uses", rows, uses)
            return
        by_prompt = group_by(self.columns.get("prompt", rows))
        self._account(rows, by_prompt, -1)
        self.columns.put("uses", rows, uses)
        self._account(rows, by_prompt, 1)
        self.trees.note_changed(rows, by_prompt)

    def _evict(self, positions: NDArray[np.uint64]) -> None:
        rows = self.columns.rows_at(np.unique(positions))
        rows = rows[rows >= 0]
        if not len(rows):
            return
        by_prompt = group_by(self.columns.get("prompt", rows))
        prompts = by_prompt.keys
        # counted out first: with status DEAD a row counts for nothing
        self._account(rows, by_prompt, -1)
        self._versions.count(self.columns.get("version", rows), -1)
        self._per_prompt[1, prompts] -= by_prompt.sizes
        self.columns.put("status", rows, DEAD)
        self.trees.note_changed(rows, by_prompt)
        self.trees.note_moved(self.rows_by_prompt.trim(prompts, self._per_prompt[1, prompts]))
        self.columns.skip_dead()

    def _account(self, rows: Rows, by_prompt: Groups, sign: int) -> None:
        """Count rows in (+1) or out (-1), with the reward, size and status that they have now."""
        table, slots = self.columns, self.columns.slots(rows)
        status, prompts = table.at("status", slots), by_prompt.keys
        self._num_of += sign * np.bincount(status, minlength=3)
        self.payload_bytes += sign * int(table.at("num_bytes", slots).sum())
        scored = status == SCORED
        counts, _, successes, recent, drawable = self._per_prompt
        counts[prompts] += sign * by_prompt.count(scored)
        successes[prompts] += sign * by_prompt.count(
            scored & (table.at("reward", slots) >= self.settings.success_reward)
        )
        usable = scored
        if self.settings.max_uses is not None:
            usable = scored & (table.at("uses", slots) < self.settings.max_uses)
            self.num_used_up += sign * int(np.count_nonzero(scored & ~usable))
        drawable[prompts] += sign * by_prompt.count(usable)
        recent[prompts] += sign * by_prompt.count(usable & self.is_recent(rows))
        for pool, num in ((REPLAY, drawable), (RECENT, recent)):
            members = num[prompts] >= self.settings.min_distinct
            self.drawable[pool].put(prompts, members)
            self.due[pool].put(prompts, members & self.draws.is_due(pool, prompts))

    def _note_turns(self, pool: int, prompts: Prompts | None) -> None:
        """Update which prompts of a pool are due, after turns of `prompts` changed (None: the pool's floor did)."""
        self._reserve_prompts(self.draws.turns.shape[1])
        num = self._per_prompt[3 if pool == RECENT else 4]
        prompts = np.arange(len(num)) if prompts is None else prompts
        due = (num[prompts] >= self.settings.min_distinct) & self.draws.is_due(pool, prompts)
        if len(prompts) == len(num):
            self.due[pool].put_all(due)
        else:
            self.due[pool].put(prompts, due)

    def _new_trees(self) -> RewardTrees:
        return RewardTrees(self.columns, self.rows_by_prompt, self.is_drawable, self.settings.big_prompt)

    def is_drawable(self, rows: Rows) -> NDArray[np.bool_]:
        """Return whether batches may hold rows [n]: scored, and not used up. [n]"""
        scored = self.columns.status(rows) == SCORED
        max_uses = self.settings.max_uses
        return scored if max_uses is None else scored & (self.columns.get("uses", rows) < max_uses)

    def _reserve_prompts(self, num: int) -> None:
        if num > self._per_prompt.shape[1]:
            size = max(64, num + num // 4)
            grown = np.zeros((5, size), dtype=np.int64)
            grown[:, : self._per_prompt.shape[1]] = self._per_prompt
            self._per_prompt = grown
            for part in (self.rows_by_prompt, *self.drawable, *self.due, self.draws):
                part.grow(size)

    def _make_room(self, num: int) -> None:
        in_use = self.columns.end - self.columns.first
        if in_use + num <= self.columns.capacity:
            return
        if 4 * (in_use - self.num_live) <= in_use:
            self.columns.grow(num)
            return
        self.columns.compact(self.live_rows(), num)
        self.rows_by_prompt = PromptRows(self._is_live)
        self.rows_by_prompt.grow(self._per_prompt.shape[1])
        rows = np.arange(self.columns.end)
        if len(rows):
            self.rows_by_prompt.append(group_by(self.columns.get("prompt", rows)), rows)
        self.trees = self._new_trees()
        # compaction has numbered the rows again
        self._pending_from = 0
        self._find_recent()

    def _is_live(self, rows: Rows) -> NDArray[np.bool_]:
        return self.columns.status(rows) != DEAD

    # ---- what is recent ---------------------------------------------------------------------------------------

    def _set_publications(self, publications: list[Publication]) -> None:
        self.publications = publications[-NUM_PUBLICATIONS_KEPT:]
        self._find_recent()

    def _find_recent(self) -> None:
        """Determine again which rollouts are recent. O(recent).

        The recent rollouts are those after the last publication but one; before the second publication, all are. With
        `alternate`, they are those after the last publication, since a phase generates before it draws. Rollouts of an
        earlier phase, left over after a kill of the trainer, have another policy age.
        """
        table, num_back = self.columns, 1 if self.settings.alternate else 2
        self._recent_from = table.first
        if len(self.publications) >= num_back:
            self._recent_from = table.row_after(self.publications[-num_back].position)
        recent = self.recent_rows()
        self._per_prompt[3] = np.bincount(table.get("prompt", recent), minlength=self._per_prompt.shape[1])
        members = self._per_prompt[3] >= self.settings.min_distinct
        self.drawable[RECENT].put_all(members)
        self.due[RECENT].put_all(members & self.draws.is_due(RECENT, np.arange(len(members))))

    def first_recent(self) -> int:
        """Return the first recent row, which may be dead. All later rows are recent too."""
        self._recent_from = max(self._recent_from, self.columns.first)
        return self._recent_from

    def is_recent(self, rows: Rows) -> NDArray[np.bool_]:
        """Return whether rows [n] are recent, whatever their status. [n]"""
        return rows >= self._recent_from

    def recent_rows(self) -> Rows:
        """Return the rows that are recent and may be drawn, ascending."""
        first = self.first_recent()
        rows = np.flatnonzero(self.columns.scan("status", first, self.columns.end) == SCORED) + first
        return rows if self.settings.max_uses is None else rows[self.is_drawable(rows)]

    def recent_missing(self, sampling: SamplingSection) -> int:
        """Return how many recent rollouts a batch of recent data alone lacks: a prompt or K rollouts for each slot."""
        num_slots, size = sampling.prompts_per_batch, sampling.group_size
        num_recent = self.drawable[RECENT].num
        missing = max(0, min(num_slots, self.num_drawable) - num_recent)
        if missing and num_recent:
            # searchers may visit fewer prompts than there are slots: then it is enough that there is data for each slot
            missing = min(missing, max(0, num_slots - int(self.recent_counts.sum()) // size))
        return missing * size

    # ---- counts -----------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Number of stored rollouts, whatever their status."""
        return int(self._num_of.sum())

    @property
    def num_scored(self) -> int:
        """Number of stored rollouts with a reward."""
        return int(self._num_of[SCORED])

    @property
    def num_pending(self) -> int:
        """Number of stored rollouts whose reward is not known yet."""
        return int(self._num_of[PENDING])

    @property
    def num_failed(self) -> int:
        """Number of stored rollouts that could not be scored."""
        return int(self._num_of[FAILED])

    @property
    def num_drawable(self) -> int:
        """Number of prompts that can fill a slot: with at least min_distinct rollouts that may be drawn."""
        return self.drawable[REPLAY].num

    @property
    def counts(self) -> NDArray[np.int64]:
        """[P] scored live rollouts per prompt number (a view: read only); P is the highest number seen, plus 1."""
        return self._per_prompt[0, : self._num_prompts]

    @property
    def live_counts(self) -> NDArray[np.int64]:
        """[P] live rollouts, whatever their status."""
        return self._per_prompt[1, : self._num_prompts]

    @property
    def successes(self) -> NDArray[np.int64]:
        """[P] scored live rollouts with a reward of at least success_reward."""
        return self._per_prompt[2, : self._num_prompts]

    @property
    def recent_counts(self) -> NDArray[np.int64]:
        """[P] live rollouts that may be drawn and are recent."""
        return self._per_prompt[3, : self._num_prompts]

    @property
    def drawable_counts(self) -> NDArray[np.int64]:
        """[P] live rollouts that may be drawn."""
        return self._per_prompt[4, : self._num_prompts]

    def versions(self) -> dict[PolicyVersion, int]:
        """Return the number of live rollouts per policy version, versions ascending."""
        return self._versions.live()

    # ---- rows -------------------------------------------------------------------------------------------------

    def live_rows(self, *, newest: int | None = None) -> Rows:
        """Return all live rows, or only the last `newest` of them, ascending."""
        table = self.columns
        wanted = self.num_live if newest is None else min(newest, self.num_live)
        num, found = wanted, np.zeros(0, dtype=np.int64)
        # dead rows lie between the live ones: look twice as far back until enough are found
        while len(found) < wanted:
            first = max(table.first, table.end - num)
            found = np.flatnonzero(table.scan("status", first, table.end) != DEAD) + first
            num *= 2
        return found[len(found) - wanted :]

    def oldest_rows(self, num: int) -> Rows:
        """Return the `num` oldest live rows, ascending."""
        return self.columns.live(self.columns.first, num=num)

    def pending_rows(self, num: int) -> Rows:
        """Return the `num` oldest live rows whose reward is not known yet, ascending."""
        first = max(self._pending_from, self.columns.first)
        rows = self.columns.live(first, num=min(num, self.num_pending), status=PENDING)
        # no row before the first pending one needs to be looked at again
        if num > 0:
            self._pending_from = int(rows[0]) if len(rows) else self.columns.end
        return rows

    def prompt_rows(self, prompt: int, *, scored_only: bool = True) -> Rows:
        """Return the live rows of one prompt, ascending."""
        if not 0 <= prompt < self._num_prompts:
            return np.zeros(0, dtype=np.int64)
        rows = self.rows_by_prompt.rows(prompt)
        status = self.columns.status(rows)
        return rows[status == SCORED if scored_only else status != DEAD]

    def rows_at(self, positions: NDArray[np.integer]) -> Rows:
        """Return the row of each log position [n], -1 where no live rollout has it."""
        return self.columns.rows_at(positions)

    def row_of(self, rollout_id: bytes) -> Rows:
        """Return the live row of a rollout as an array of length 1, or an empty array. O(rollouts); copies no ids."""
        table, found = self.columns, []
        for first, ids in table.pieces("rollout_id", table.first, table.end):
            halves = ids.view("<u8").reshape(-1, 2)
            one, other = np.frombuffer(rollout_id, dtype="<u8")
            hits = np.flatnonzero(halves[:, 0] == one)
            found.append(hits[halves[hits, 1] == other] + first)
        rows = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        return rows[self._is_live(rows)][-1:]

    def column(self, name: str, rows: Rows) -> NDArray:
        """Return a field of CHECKPOINT_DTYPE for rows [n]. [n]

        Raises:
            KeyError: no such field.
        """
        if name in ("lineage", "step"):
            values = self._versions.lineages if name == "lineage" else self._versions.steps
            return values[self.columns.get("version", rows)]
        return self.columns.get(name, rows).astype(CHECKPOINT_DTYPE[name], copy=False)

    def rollout_ids(self, rows: Rows) -> list[bytes]:
        """Return the 16-byte ids of rows."""
        # one copy of all ids, then slices: an item of a void array costs far more
        packed = self.columns.get("rollout_id", rows).tobytes()
        return [packed[at : at + 16] for at in range(0, len(packed), 16)]

    def memory_bytes(self) -> int:
        """Return the memory of the index in bytes."""
        parts = (self.columns, self.rows_by_prompt, self.trees, self.draws, *self.drawable, *self.due)
        return sum(part.num_bytes for part in parts) + self._per_prompt.nbytes


def _is_unusable(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which records or changes [n] have status scored but no reward within MAX_NUMBER. [n]"""
    return (records["status"] == SCORED) & ~(np.abs(records["reward"]) <= MAX_NUMBER)
