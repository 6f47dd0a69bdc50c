"""Choose the prompts of a batch's slots: in turn, or by the weight of their rollouts (mop.py).

Both take the next prompt of a random sequence that the batch has not used yet. So the prompts of a batch differ while
unused ones are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tba_buffer.index.priorities import MAX_EXCESS, gumbel_noise, gumbel_top_k
from tba_buffer.index.reward_trees import RewardTrees
from tba_buffer.index.rollout_index import Index
from tba_buffer.index.tables import PromptSet

_MAX_ROUNDS = 8
"""Rounds of independent draws before all prompts are weighed one by one."""


class _Choice:
    """Takes prompts from a random sequence; `_draw` returns a new sequence."""

    _taken: list[int]

    def restart(self) -> None:
        """Begin a new sequence, when the batch has used every prompt and may use all again."""
        self._sequence = self._draw()

    def take(self, used: set[int]) -> int | None:
        """Return the next prompt that is not in `used`; None if the sequence has no more."""
        for prompt in self._sequence:
            if prompt not in used:
                self._taken.append(prompt)
                return prompt
        return None

    def _draw(self) -> Iterator[int]:
        raise NotImplementedError


class TurnChoice(_Choice):
    """Chooses the prompts of a pool in turn: uniformly among the unused prompts with the fewest turns.

    The sequence has the prompts with fewer turns first. Prompts with equally many turns are in random order: a
    permutation if they are few, independent draws if they are many. Either way the next unused prompt is uniform among
    the unused ones with the fewest turns.

    Args:
        index: has the turns of prompts.
        pool: RECENT or REPLAY.
        num_slots: the number of slots of the batch.
        rng: the random generator of the batch.
    """

    def __init__(self, index: Index, pool: int, num_slots: int, rng: np.random.Generator) -> None:
        self._prompts = prompts = index.drawable[pool]
        self._num_slots = num_slots
        self._rng = rng
        self._turns = index.draws.turns[pool]
        self._taken = []
        self.floor = int(index.draws.floors[pool])
        self._due = index.due[pool]
        # the round is over: the next one begins
        if not self._due.num and prompts.num:
            members = prompts.all()
            turns = np.maximum(self._turns[members], self.floor)
            self.floor = int(turns.min())
            flags = np.zeros(len(self._turns), dtype=bool)
            flags[members[turns == self.floor]] = True
            self._due = PromptSet()
            self._due.grow(len(flags))
            self._due.put_all(flags)
        self.restart()

    def turns_taken(self) -> list[int]:
        """Return for each `take` which turn of its prompt it was, counted from 1."""
        before = np.maximum(self._turns[np.array(self._taken, dtype=np.int64)], self.floor).tolist()
        taken, turns = Counter[int](), []
        for prompt, num in zip(self._taken, before, strict=True):
            taken[prompt] += 1
            turns.append(num + taken[prompt])
        return turns

    def _draw(self) -> Iterator[int]:
        # nothing of this batch counts yet: who is due is known
        if not self._taken:
            yield from self._in_random_order(self._due.num, self._due.by_rank)
        prompts = self._prompts.all()
        turns = np.maximum(self._turns[prompts], self.floor)
        np.add.at(turns, np.searchsorted(prompts, np.array(self._taken, dtype=np.int64)), 1)
        for num in np.unique(turns).tolist():
            level = prompts[turns == num]
            yield from self._in_random_order(len(level), level.__getitem__)

    def _in_random_order(self, num: int, by_rank: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Iterator[int]:
        if num <= 2 * self._num_slots:
            order = self._rng.permutation(num) if num > 1 else np.arange(num)
            yield from by_rank(order).tolist() if num else ()
            return
        while True:  # a batch can use at most half of them, so this finds unused ones soon
            yield from by_rank(self._rng.integers(0, num, self._num_slots + 8)).tolist()


class WeightedChoice(_Choice):
    """Chooses prompts by the total weight of their rollouts, mixed with a uniform share (mop.py, "across").

    Unused prompts follow one another as in draws without replacement. No turns are taken.

    Args:
        trees, counts: from the index; counts [P] of drawable rollouts.
        min_distinct, inverse_temperature, uniform_share, num_slots: the settings of the draw.
        rng: the random generator of the batch.
    """

    floor = 0

    def __init__(
        self,
        trees: RewardTrees,
        counts: NDArray[np.int64],
        *,
        min_distinct: int,
        inverse_temperature: float,
        uniform_share: float,
        num_slots: int,
        rng: np.random.Generator,
    ) -> None:
        self._trees = trees
        self._counts = counts
        self._inverse_temperature = inverse_temperature
        self._uniform_share = uniform_share
        self._num_slots = num_slots
        self._rng = rng
        self._prompts = trees.of_prompts(counts, min_distinct, self._inverse_temperature)
        self._taken = []
        self._only = int(self._prompts.by_rank(np.zeros(1, dtype=np.int64))[0]) if self._prompts.num == 1 else None
        self.restart()

    def _draw(self) -> Iterator[int]:
        if self._only is not None:
            yield self._only
            return
        for _ in range(_MAX_ROUNDS):
            yield from self._prompts.draw(self._num_slots + 8, self._uniform_share, self._rng, self._keeps).tolist()
        # a few prompts have nearly all the weight: order all prompts at once, which is the same distribution
        prompts, terms, scale = self._prompts.gumbel_terms(self._uniform_share, self._exact_values)
        noise = scale * gumbel_noise(len(prompts), self._rng)
        yield from prompts[gumbel_top_k(terms[None], noise[None], len(prompts))[0]].tolist()

    def turns_taken(self) -> list[int]:
        """Return 0 for each `take`: a weighted choice takes no turn."""
        return [0] * len(self._taken)

    def _keeps(self, prompts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which drawn prompts [k] to keep. A big prompt was drawn by an upper bound of its weight, so it is kept
        with probability weight / bound."""
        num = np.where(self._counts[prompts] > self._trees.big_prompt, self._counts[prompts], 0)
        fate = self._rng.random(len(prompts))
        kept = fate >= num * MAX_EXCESS
        for at in np.flatnonzero(~kept).tolist():
            tree = self._trees.of_prompt(int(prompts[at]), self._inverse_temperature)
            kept[at] = fate[at] >= -np.expm1(tree.log_mass() - tree.log_mass_bound)
        return kept

    def _exact_values(self, prompts: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        values = values.copy()
        for at in np.flatnonzero(self._counts[prompts] > self._trees.big_prompt).tolist():
            values[at] = self._trees.of_prompt(int(prompts[at]), self._inverse_temperature).log_mass()
        return values
