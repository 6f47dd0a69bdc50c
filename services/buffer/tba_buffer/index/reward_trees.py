"""The weights of rollouts, and trees of them over the index, for draws from many rollouts.

of_prompt   one prompt with many rollouts; leaf = place in its block
of_prompts  prompts by the total weight of their rollouts (prioritise = "across"); leaf = prompt number
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tba_buffer.index.priorities import LOWEST, Priorities
from tba_buffer.index.tables import Columns, Groups, PromptRows, Prompts, Rows, VersionNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weight of a rollout: exp(inverse_temperature * reward) * 2^(-age / age_half_life_steps).

    All ages grow together, so weights relative to each other stay as they are: the exponent holds the step that a
    rollout was made at in place of its age, and trees need no update as time passes.
    """

    inverse_temperature: float = 0.0
    age_half_life_steps: float | None = None
    """None: the age does not matter."""
    common_steps: tuple[tuple[int, int], ...] = ()
    """Lineage, and its last step in common with the trainer's history, lineages ascending (LineageTree.common_steps).
    Empty: every step is. A rollout made after it counts as made at it, as policy ages are counted."""

    @property
    def scale(self) -> float:
        """The weight is exp(scale * value), for the values of `RewardTrees.values`."""
        return self.inverse_temperature if self.age_half_life_steps is None else 1.0

    def log_decay(self, lineages: NDArray[np.integer], steps: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return log 2^(step / half-life) of versions [V]; needs a half-life. [V]"""
        assert self.age_half_life_steps is not None
        made_at = steps.astype(np.float64)
        if self.common_steps:
            known, last = np.array(self.common_steps, dtype=np.int64).T
            at = np.minimum(np.searchsorted(known, lineages), len(known) - 1)
            made_at = np.minimum(made_at, np.where(known[at] == lineages, last[at], 0))
        return made_at * (math.log(2) / self.age_half_life_steps)


@dataclass(slots=True)
class _Tree:
    priorities: Priorities
    weights: Weights
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
        columns, rows_by_prompt, versions: of the index.
        is_drawable: returns which of rows [n] batches may hold, [n] bool.
        big_prompt: a prompt with more of them than this is big.
    """

    def __init__(
        self,
        columns: Columns,
        rows_by_prompt: PromptRows,
        versions: VersionNumbers,
        is_drawable: Callable[[Rows], NDArray[np.bool_]],
        big_prompt: int,
    ) -> None:
        self.big_prompt = big_prompt
        self._columns = columns
        self._rows_by_prompt = rows_by_prompt
        self._versions = versions
        self._is_drawable = is_drawable
        self._of_prompt: dict[int, _Tree] = {}
        self._of_prompts: _Tree | None = None
        self._across_min_distinct = 0

    @property
    def num_bytes(self) -> int:
        """Memory."""
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
        """Forget the trees of prompts whose blocks were rewritten: leaves are places in the block."""
        if self._of_prompt:
            for prompt in prompts.tolist():
                self._of_prompt.pop(prompt, None)

    def values(self, rows: Rows, weights: Weights) -> NDArray[np.float64]:
        """Return the values of rows [n]: the weight of a row is exp(weights.scale * value). [n]"""
        rewards = self._columns.get("reward", rows)
        if weights.age_half_life_steps is None:
            return rewards
        with np.errstate(over="ignore"):
            logits = np.clip(weights.inverse_temperature * rewards, LOWEST, -LOWEST)
        decay = weights.log_decay(self._versions.lineages, self._versions.steps)
        return logits + decay[self._columns.get("version", rows)]

    def of_prompt(self, prompt: int, weights: Weights) -> Priorities:
        """Return the rollouts of one prompt that may be drawn, by weight; leaf i is row i of its block."""
        rows = self._rows_by_prompt.rows(prompt)
        tree = self._of_prompt.get(prompt)
        # a block that outgrew the tree, or other weights: built again
        if tree is None or tree.capacity < len(rows) or tree.weights != weights:
            priorities = Priorities(*self._drawable(rows, weights), weights.scale)
            self._of_prompt[prompt] = _Tree(priorities, weights, len(rows), priorities.capacity)
            return priorities
        changed = tree.take_changed()
        # changed rows and those that were appended since the last draw
        old = np.searchsorted(rows[: tree.end], changed)
        leaves = np.concatenate([old[old < tree.end], np.arange(tree.end, len(rows))])
        tree.priorities.set(leaves, *self._drawable(rows[leaves], weights))
        tree.end = len(rows)
        return tree.priorities

    def of_prompts(self, counts: NDArray[np.int64], min_distinct: int, weights: Weights) -> Priorities:
        """Return the prompts with at least `min_distinct` of `counts` [P], by the log of their total weight."""
        tree = self._of_prompts
        is_other = tree is None or tree.weights != weights or self._across_min_distinct != min_distinct
        if tree is None or is_other or tree.capacity < len(counts):
            self._across_min_distinct = min_distinct
            members = counts >= min_distinct
            values = np.zeros(len(counts))
            values[members] = self._log_masses(np.flatnonzero(members), counts, weights)
            priorities = Priorities(values, members, 1.0)
            tree = self._of_prompts = _Tree(priorities, weights, 0, priorities.capacity)
            return priorities
        prompts = tree.take_changed()
        members = counts[prompts] >= min_distinct
        values = np.zeros(len(prompts))
        values[members] = self._log_masses(prompts[members], counts, weights)
        tree.priorities.set(prompts, values, members)
        return tree.priorities

    def _log_masses(self, prompts: Prompts, counts: NDArray[np.int64], weights: Weights) -> NDArray[np.float64]:
        """Return the log of the total weight of the drawable rollouts of each prompt [k]; counts [P] of them.

        Big prompts get an upper bound (`Priorities.log_mass_bound`).
        """
        if weights.scale == 0:
            return np.log(counts[prompts])
        masses, big = np.empty(len(prompts)), counts[prompts] > self.big_prompt
        for at in np.flatnonzero(big).tolist():
            masses[at] = self.of_prompt(int(prompts[at]), weights).log_mass_bound
        if len(small := prompts[~big]):
            values, members = self._drawable(self._rows_by_prompt.rows_of(small)[0], weights)
            num = counts[small]
            starts = np.cumsum(num) - num
            with np.errstate(over="ignore"):
                logits = np.clip(weights.scale * values[members], LOWEST, -LOWEST)
            top = np.maximum.reduceat(logits, starts)
            masses[~big] = top + np.log(np.add.reduceat(np.exp(logits - np.repeat(top, num)), starts))
        return masses

    def _drawable(self, rows: Rows, weights: Weights) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return self.values(rows, weights), self._is_drawable(rows)
