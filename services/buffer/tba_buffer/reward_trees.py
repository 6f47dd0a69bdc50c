"""The trees that draws from many rollouts need, built when a draw first asks and kept up to date from then on.

    of_prompt   one prompt with many rollouts; leaf = place in its block
    of_all      every rollout; leaf = slot of the ring
    of_prompts  prompts by the total weight of their rollouts (prioritise = "across"); leaf = prompt number

The index notes what changed (cheap); the next draw that uses a tree applies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tba_buffer.blocks import Blocks
from tba_buffer.log import SCORED
from tba_buffer.priorities import LOWEST, Priorities
from tba_buffer.ragged import Groups
from tba_buffer.table import Table

Rows = NDArray[np.int64]
Prompts = NDArray[np.int64]


@dataclass(slots=True)
class _Tree:
    priorities: Priorities
    end: int
    """Rows (of `of_prompt`: places in the block) from here on are not in it yet."""
    capacity: int
    """Leaves are numbered for this many; with more, the tree is built again."""
    changed: list[NDArray[np.int64]] = field(default_factory=list)

    def note(self, items: NDArray) -> None:
        """Rows or prompts to look at again before the next draw."""
        self.changed.append(items)
        if len(self.changed) > 1000:  # nobody draws: keep each item once, not the whole history
            self.changed = [np.unique(np.concatenate(self.changed))]

    def take_changed(self) -> NDArray[np.int64]:
        """The noted items, ascending and distinct; they are no longer noted."""
        if not self.changed:
            return np.zeros(0, dtype=np.int64)
        changed, self.changed = np.unique(np.concatenate(self.changed)), []
        return changed


class RewardTrees:
    """Priorities over the rows of a table.

    Args:
        table, blocks: of the index.
        big_prompt: a prompt with more scored rollouts than this is big.
    """

    def __init__(self, table: Table, blocks: Blocks, big_prompt: int) -> None:
        self.big_prompt = big_prompt
        self._table = table
        self._blocks = blocks
        self._of_prompt: dict[int, _Tree] = {}
        self._of_all: _Tree | None = None
        self._of_prompts: _Tree | None = None
        self._across = (0, 0.0)

    @property
    def num_bytes(self) -> int:
        """Memory."""
        others = [tree for tree in (self._of_all, self._of_prompts) if tree]
        return sum(tree.priorities.num_bytes for tree in [*others, *self._of_prompt.values()])

    def note_added(self, prompts: Prompts) -> None:
        """Rows were appended to these prompts."""
        if self._of_prompts:
            self._of_prompts.note(prompts)

    def note_changed(self, rows: Rows, by_prompt: Groups) -> None:
        """The status or the reward of rows changed."""
        if self._of_all:
            self._of_all.note(rows)
        if self._of_prompts:
            self._of_prompts.note(by_prompt.keys)
        if self._of_prompt:
            for group, prompt in enumerate(by_prompt.keys.tolist()):
                if tree := self._of_prompt.get(prompt):
                    first = by_prompt.firsts[group]
                    tree.note(rows[by_prompt.order[first : first + by_prompt.sizes[group]]])

    def note_moved(self, prompts: Prompts) -> None:
        """The blocks of these prompts were rewritten."""
        if self._of_prompt:
            for prompt in prompts.tolist():
                self._of_prompt.pop(prompt, None)

    def of_prompt(self, prompt: int, inverse_temperature: float) -> Priorities:
        """Scored rollouts of one prompt by reward; leaf i is row i of its block."""
        rows = self._blocks.rows(prompt)
        tree = self._of_prompt.get(prompt)
        if tree is None or tree.capacity < len(rows) or tree.priorities.inverse_temperature != inverse_temperature:
            priorities = Priorities(*self._rewards(rows), inverse_temperature)
            self._of_prompt[prompt] = _Tree(priorities, len(rows), priorities.capacity)
            return priorities
        changed = tree.take_changed()
        old = np.searchsorted(rows[: tree.end], changed)
        leaves = np.concatenate([old[old < tree.end], np.arange(tree.end, len(rows))])
        tree.priorities.set(leaves, *self._rewards(rows[leaves]))
        tree.end = len(rows)
        return tree.priorities

    def of_all(self, inverse_temperature: float) -> Priorities:
        """All scored rollouts by reward; leaf = slot of the row."""
        table, tree = self._table, self._of_all
        fits = tree is not None and tree.capacity == table.capacity and 4 * (table.end - tree.end) < table.capacity
        if tree is None or not fits or tree.priorities.inverse_temperature != inverse_temperature:
            values, members = np.zeros(table.capacity), np.zeros(table.capacity, dtype=bool)
            rows = np.arange(table.first, table.end)
            values[rows % table.capacity], members[rows % table.capacity] = self._rewards(rows)
            tree = self._of_all = _Tree(Priorities(values, members, inverse_temperature), table.end, table.capacity)
        else:
            rows = np.concatenate([tree.take_changed(), np.arange(tree.end, table.end)])
            slots = np.unique(rows % table.capacity)
            # a slot has the state of the newest row that was ever in it
            members = table.get("status", slots) == SCORED
            tree.priorities.set(slots, table.get("reward", slots), members)
            tree.end = table.end
        tree.priorities.origin = table.first % table.capacity
        return tree.priorities

    def of_prompts(self, counts: NDArray[np.int64], min_distinct: int, inverse_temperature: float) -> Priorities:
        """Prompts with at least `min_distinct` of `counts` [P] scored rollouts, by the log of their total weight."""
        tree = self._of_prompts
        if tree is None or tree.capacity < len(counts) or self._across != (min_distinct, inverse_temperature):
            self._across = (min_distinct, inverse_temperature)
            members = counts >= min_distinct
            values = np.zeros(len(counts))
            values[members] = self._log_masses(np.flatnonzero(members), counts, inverse_temperature)
            priorities = Priorities(values, members, 1.0)
            tree = self._of_prompts = _Tree(priorities, 0, priorities.capacity)
            return priorities
        prompts = tree.take_changed()
        members = counts[prompts] >= min_distinct
        values = np.zeros(len(prompts))
        values[members] = self._log_masses(prompts[members], counts, inverse_temperature)
        tree.priorities.set(prompts, values, members)
        return tree.priorities

    def _log_masses(
        self, prompts: Prompts, counts: NDArray[np.int64], inverse_temperature: float
    ) -> NDArray[np.float64]:
        """log of the sum of exp(inverse_temperature * reward) over the scored rollouts of each prompt [k].

        Of a big prompt an upper bound: see `Priorities.log_mass_bound`.
        """
        if inverse_temperature == 0:
            return np.log(counts[prompts])
        masses, big = np.empty(len(prompts)), counts[prompts] > self.big_prompt
        for at in np.flatnonzero(big).tolist():
            masses[at] = self.of_prompt(int(prompts[at]), inverse_temperature).log_mass_bound
        if len(small := prompts[~big]):
            rewards, members = self._rewards(self._blocks.rows_of(small)[0])
            num = counts[small]
            starts = np.cumsum(num) - num
            with np.errstate(over="ignore"):
                logits = np.clip(inverse_temperature * rewards[members], LOWEST, -LOWEST)
            top = np.maximum.reduceat(logits, starts)
            masses[~big] = top + np.log(np.add.reduceat(np.exp(logits - np.repeat(top, num)), starts))
        return masses

    def _rewards(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return self._table.get("reward", rows), self._table.status(rows) == SCORED
