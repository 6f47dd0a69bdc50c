"""Sum trees over the weights of rollouts, for draws from many rollouts.

of_prompt   one prompt with many rollouts; leaf = place in its block
of_prompts  prompts by the total weight of their rollouts (prioritise = "across"); leaf = prompt number
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tba_buffer.index.priorities import LOWEST, Priorities
from tba_buffer.index.tables import Columns, Groups, PromptRows, Prompts, Rows


@dataclass(slots=True)
class _Tree:
    priorities: Priorities
    inverse_temperature: float
    """The parameter of the weights exp(inverse_temperature * reward)."""
    end: int
    """Number of places of the block that are in the tree; used by `of_prompt` alone."""
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
    """Builds the trees when they are first asked for, and keeps them up to date with the index.

    Args:
        columns, rows_by_prompt: the tables of the index.
        is_drawable: returns which of rows [n] batches may hold, [n] bool.
        big_prompt: a prompt with more drawable rows than this is big: `of_prompts` takes its weight from `of_prompt`.
    """

    def __init__(
        self,
        columns: Columns,
        rows_by_prompt: PromptRows,
        is_drawable: Callable[[Rows], NDArray[np.bool_]],
        big_prompt: int,
    ) -> None:
        self.big_prompt = big_prompt
        self._columns = columns
        self._rows_by_prompt = rows_by_prompt
        self._is_drawable = is_drawable
        self._of_prompt: dict[int, _Tree] = {}
        self._of_prompts: _Tree | None = None

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        others = [self._of_prompts] if self._of_prompts else []
        return sum(tree.priorities.num_bytes for tree in [*others, *self._of_prompt.values()])

    def note_added(self, prompts: Prompts) -> None:
        """Note that rows were appended to these prompts."""
        if self._of_prompts:
            self._of_prompts.note(prompts)

    def note_changed(self, rows: Rows, by_prompt: Groups) -> None:
        """Note that the status or the reward of rows changed."""
        if self._of_prompts:
            self._of_prompts.note(by_prompt.keys)
        if self._of_prompt:
            for group, prompt in enumerate(by_prompt.keys.tolist()):
                if tree := self._of_prompt.get(prompt):
                    first = by_prompt.firsts[group]
                    tree.note(rows[by_prompt.order[first : first + by_prompt.sizes[group]]])

    def note_moved(self, prompts: Prompts) -> None:
        """Forget the trees of prompts whose blocks were rewritten, because leaves are places in the block."""
        if self._of_prompt:
            for prompt in prompts.tolist():
                self._of_prompt.pop(prompt, None)

    def of_prompt(self, prompt: int, inverse_temperature: float) -> Priorities:
        """Return the drawable rollouts of one prompt with their rewards as values; leaf i is row i of its block."""
        rows = self._rows_by_prompt.rows(prompt)
        tree = self._of_prompt.get(prompt)
        # a block that outgrew the tree, or other weights: built again
        if tree is None or tree.capacity < len(rows) or tree.inverse_temperature != inverse_temperature:
            priorities = Priorities(*self._drawable(rows), inverse_temperature)
            self._of_prompt[prompt] = _Tree(priorities, inverse_temperature, len(rows), priorities.capacity)
            return priorities
        changed = tree.take_changed()
        # changed rows and those that were appended since the last draw
        old = np.searchsorted(rows[: tree.end], changed)
        leaves = np.concatenate([old[old < tree.end], np.arange(tree.end, len(rows))])
        tree.priorities.set(leaves, *self._drawable(rows[leaves]))
        tree.end = len(rows)
        return tree.priorities

    def of_prompts(self, counts: NDArray[np.int64], min_distinct: int, inverse_temperature: float) -> Priorities:
        """Return the prompts with `counts` [P] >= `min_distinct`; a prompt's value is the log of its total weight."""
        tree = self._of_prompts
        if tree and (tree.capacity < len(counts) or tree.inverse_temperature != inverse_temperature):
            tree = None
        prompts = tree.take_changed() if tree else np.arange(len(counts))
        members = counts[prompts] >= min_distinct
        values = np.zeros(len(prompts))
        values[members] = self._log_masses(prompts[members], counts, inverse_temperature)
        if tree:
            tree.priorities.set(prompts, values, members)
            return tree.priorities
        priorities = Priorities(values, members, 1.0)
        self._of_prompts = _Tree(priorities, inverse_temperature, 0, priorities.capacity)
        return priorities

    def _log_masses(
        self, prompts: Prompts, counts: NDArray[np.int64], inverse_temperature: float
    ) -> NDArray[np.float64]:
        """Return the log of the total weight of the drawable rollouts of each prompt [k].

        `counts` [P] has their number for every prompt. Big prompts get an upper bound (`Priorities.log_mass_bound`).
        """
        if inverse_temperature == 0:
            return np.log(counts[prompts])
        masses, big = np.empty(len(prompts)), counts[prompts] > self.big_prompt
        for at in np.flatnonzero(big).tolist():
            masses[at] = self.of_prompt(int(prompts[at]), inverse_temperature).log_mass_bound
        if len(small := prompts[~big]):
            values, members = self._drawable(self._rows_by_prompt.rows_of(small)[0])
            num = counts[small]
            starts = np.cumsum(num) - num
            with np.errstate(over="ignore"):
                logits = np.clip(inverse_temperature * values[members], LOWEST, -LOWEST)
            top = np.maximum.reduceat(logits, starts)
            masses[~big] = top + np.log(np.add.reduceat(np.exp(logits - np.repeat(top, num)), starts))
        return masses

    def _drawable(self, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return self._columns.get("reward", rows), self._is_drawable(rows)
