"""Priorities of rollouts by reward, built when a draw first asks and kept up to date from then on.

    of_prompt   one prompt with many rollouts; leaf = place in its block
    of_all      every rollout; leaf = slot of the ring of columns
    of_prompts  prompts by the total weight of their rollouts (prioritise = "across"); leaf = prompt number

The index notes what changed, which is cheap. The next draw that uses a tree applies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tba_buffer.index.columns import Columns
from tba_buffer.index.log import SCORED
from tba_buffer.index.priorities import LOWEST, Priorities
from tba_buffer.index.prompt_rows import Groups, PromptRows

Rows = NDArray[np.int64]
Prompts = NDArray[np.int64]


@dataclass(slots=True)
class _Tree:
    priorities: Priorities
    end: int
    """Rows (with `of_prompt`: places in the block) from here on are not in it yet."""
    capacity: int
    """Most leaves; with more, the tree is built again."""
    changed: list[NDArray[np.int64]] = field(default_factory=list)

    def note(self, items: NDArray) -> None:
        """Note rows or prompts to update before the next draw."""
        self.changed.append(items)
        if len(self.changed) > 1000:  # nobody draws: keep each item once instead of the whole history
            self.changed = [np.unique(np.concatenate(self.changed))]

    def take_changed(self) -> NDArray[np.int64]:
        """Return the noted items, ascending and distinct, and forget them."""
        if not self.changed:
            return np.zeros(0, dtype=np.int64)
        changed, self.changed = np.unique(np.concatenate(self.changed)), []
        return changed


class RewardTrees:
    """Priorities over the rows of an index.

    Args:
        columns, rows_by_prompt: of the index.
        big_prompt: a prompt with more scored rollouts than this is big.
    """

    def __init__(self, columns: Columns, rows_by_prompt: PromptRows, big_prompt: int) -> None:
        self.big_prompt = big_prompt
        self._columns = columns
        self._rows_by_prompt = rows_by_prompt
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
        """Note that rows were appended to these prompts."""
        if self._of_prompts:
            self._of_prompts.note(prompts)

    def note_changed(self, rows: Rows, by_prompt: Groups) -> None:
        """Note that the status or the reward of rows changed."""
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
        """Forget the trees of prompts whose blocks were rewritten: leaves are places in the block."""
        if self._of_prompt:
            for prompt in prompts.tolist():
                self._of_prompt.pop(prompt, None)

    def of_prompt(self, prompt: int, inverse_temperature: float) -> Priorities:
        """Return the scored rollouts of one prompt by reward; leaf i is row i of its block."""
        rows = self._rows_by_prompt.rows(prompt)
        tree = self._of_prompt.get(prompt)
        # a block that outgrew the tree, or another temperature: built again
        if tree is None or tree.capacity < len(rows) or tree.priorities.inverse_temperature != inverse_temperature:
            priorities = Priorities(*self._rewards(rows), inverse_temperature)
            self._of_prompt[prompt] = _Tree(priorities, len(rows), priorities.capacity)
            return priorities
        changed = tree.take_changed()
        # changed rows and those that were appended since the last draw
        old = np.searchsorted(rows[: tree.end], changed)
        leaves = np.concatenate([old[old < tree.end], np.arange(tree.end, len(rows))])
        tree.priorities.set(leaves, *self._rewards(rows[leaves]))
        tree.end = len(rows)
        return tree.priorities

    def of_all(self, inverse_temperature: float) -> Priorities:
        """Return all scored rollouts by reward; leaf = slot of the row."""
        columns, tree = self._columns, self._of_all
        fits = (
            tree is not None and tree.capacity == columns.capacity and 4 * (columns.end - tree.end) < columns.capacity
        )
        if tree is None or not fits or tree.priorities.inverse_temperature != inverse_temperature:
            values, members = np.zeros(columns.capacity), np.zeros(columns.capacity, dtype=bool)
            rows = np.arange(columns.first, columns.end)
            values[rows % columns.capacity], members[rows % columns.capacity] = self._rewards(rows)
            priorities = Priorities(values, members, inverse_temperature)
            tree = self._of_all = _Tree(priorities, columns.end, columns.capacity)
        else:
            rows = np.concatenate([tree.take_changed(), np.arange(tree.end, columns.end)])
            slots = np.unique(rows % columns.capacity)
            # a slot has the state of the newest row that was ever in it
            members = columns.get("status", slots) == SCORED
            tree.priorities.set(slots, columns.get("reward", slots), members)
            tree.end = columns.end
        tree.priorities.origin = columns.first % columns.capacity
        return tree.priorities

    def of_prompts(self, counts: NDArray[np.int64], min_distinct: int, inverse_temperature: float) -> Priorities:
        """Return the prompts with at least `min_distinct` of `counts` [P], by the log of their total weight."""
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
        """Return the log of the sum of exp(inverse_temperature * reward) over the scored rollouts of each prompt [k].

        Big prompts get an upper bound (`Priorities.log_mass_bound`).
        """
        if inverse_temperature == 0:
            return np.log(counts[prompts])
        masses, big = np.empty(len(prompts)), counts[prompts] > self.big_prompt
        for at in np.flatnonzero(big).tolist():
            masses[at] = self.of_prompt(int(prompts[at]), inverse_temperature).log_mass_bound
        if len(small := prompts[~big]):
            rewards, members = self._rewards(self._rows_by_prompt.rows_of(small)[0])
            num = counts[small]
            starts = np.cumsum(num) - num
            with np.errstate(over="ignore"):
                logits = np.clip(inverse_temperature * rewards[members], LOWEST, -LOWEST)
            top = np.maximum.reduceat(logits, starts)
            masses[~big] = top + np.log(np.add.reduceat(np.exp(logits - np.repeat(top, num)), starts))
        return masses

    def _rewards(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return self._columns.get("reward", rows), self._columns.status(rows) == SCORED
