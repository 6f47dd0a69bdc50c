"""Chooses the prompts of a batch, one after the other, each new to the batch while there are new ones.

A choice is the next prompt of a random sequence that the batch has not used yet. For few prompts the sequence is a
random order of all of them, for many it is independent draws: either way the next unused one is uniform among the
unused (or, by weight, has the probability of drawing without replacement).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tba_buffer.priorities import MAX_EXCESS, gumbel, race
from tba_buffer.prompt_set import PromptSet
from tba_buffer.reward_trees import RewardTrees

_MAX_ROUNDS = 8
"""Independent draws per slot before all prompts are put in order at once."""


class UniformChoice:
    """Prompts of a set, uniformly.

    Args:
        prompts: to choose from.
        num_slots: choices to expect.
        rng: of the batch.
    """

    def __init__(self, prompts: PromptSet, num_slots: int, rng: np.random.Generator) -> None:
        self._prompts = prompts
        self._num_slots = num_slots
        self._rng = rng
        self._few = prompts.by_rank(np.arange(prompts.num)) if prompts.num <= 2 * num_slots else None
        self.restart()

    def restart(self) -> None:
        """The batch has used every prompt; all may be used again."""
        self._sequence = self._draw()

    def _draw(self) -> Iterator[int]:
        if self._few is not None:
            yield from (self._few[self._rng.permutation(len(self._few))] if len(self._few) > 1 else self._few).tolist()
            return
        while True:  # at most half of them can be used
            ranks = self._rng.integers(0, self._prompts.num, self._num_slots + 8)
            yield from self._prompts.by_rank(ranks).tolist()

    def take(self, used: set[int]) -> int | None:
        """The next prompt that is not used; none: all are."""
        for prompt in self._sequence:
            if prompt not in used:
                return prompt
        return None


class WeightedChoice:
    """Prompts by the total weight of their rollouts, mixed with a uniform share.

    Args:
        trees, counts: of the index.
        min_distinct, inverse_temperature, uniform_share, num_slots: of the draw.
        rng: of the batch.
    """

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
        self._prompts = trees.of_prompts(counts, min_distinct, inverse_temperature)
        self._only = int(self._prompts.by_rank(np.zeros(1, dtype=np.int64))[0]) if self._prompts.num == 1 else None
        self.restart()

    def restart(self) -> None:
        """The batch has used every prompt; all may be used again."""
        self._sequence = self._draw()

    def take(self, used: set[int]) -> int | None:
        """The next prompt that is not used; none: all are."""
        for prompt in self._sequence:
            if prompt not in used:
                return prompt
        return None

    def _draw(self) -> Iterator[int]:
        if self._only is not None:
            yield self._only
            return
        for _ in range(_MAX_ROUNDS):
            yield from self._prompts.draw(self._num_slots + 8, self._uniform_share, self._rng, self._keeps).tolist()
        # a few prompts have nearly all the weight: order all prompts at once, which is the same distribution
        prompts, terms, scale = self._prompts.race_terms(self._uniform_share, self._exact_values)
        noise = scale * gumbel(len(prompts), self._rng)
        yield from prompts[race(terms[None], noise[None], len(prompts))[0]].tolist()

    def _keeps(self, prompts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """A big prompt has an upper bound for its weight: keep it with probability weight / bound."""
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
