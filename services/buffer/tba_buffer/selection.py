"""Prompt selection by posterior success, as in MoPPS (arXiv 2507.04632). Pure functions.

A prompt's success rate has the prior Beta(1, 1), so after s successes in n scored rollouts its posterior is
Beta(1 + s, 1 + n - s). Per visit to fill, `num_candidates` prompts are looked at: one Thompson draw of each one's rate,
and the draws nearest to the target win. A prompt that nobody has tried draws uniformly, so it is tried soon; one known
to be too easy or too hard draws far from the target, and comes back only when its posterior is wide.

The rollouts counted are those that are stored now: the paper's discount of old evidence is here the eviction of old
rollouts. What bounds the buffer (`max_rollouts`, `max_rollouts_per_prompt`, `max_policy_age_steps`) is therefore also
the window that the posterior remembers; a prompt whose rollouts are all gone is unknown again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    """How prompts are chosen: the success rate looked for, and the prompts looked at per visit."""

    target: float
    num_candidates: int

    @classmethod
    def of(cls, recipe: Recipe) -> SelectionSettings | None:
        """From a recipe; None where every epoch visits every prompt."""
        if recipe.data.selection == "epochs":
            return None
        return cls(target=recipe.data.selection_target, num_candidates=recipe.data.selection_candidates)


def candidate_offsets(num_train: int, num: int, rng: np.random.Generator) -> Ints:
    """`num` of the offsets 0 .. num_train - 1, uniform [num]; all different unless there are fewer than `num`.

    Costs O(num), not O(num_train).
    """
    return rng.choice(num_train, size=num, replace=num > num_train)


def thompson_draws(counts: Ints, successes: Ints, rng: np.random.Generator) -> NDArray[np.float64]:
    """One draw from each posterior Beta(1 + successes, 1 + counts - successes) [N]."""
    return rng.beta(1.0 + successes, 1.0 + (counts - successes))


def nearest(draws: NDArray[np.float64], target: float, num: int) -> Ints:
    """Places of the `num` draws that are nearest to the target, nearest first; equal ones in their order."""
    return np.argsort(np.abs(draws - target), kind="stable")[:num]


def choose(
    train_numbers: Ints, counts: Ints, successes: Ints, num: int, settings: SelectionSettings, rng: np.random.Generator
) -> Ints:
    """Offsets [num] into the train prompts for `num` visits, nearest to the target first.

    With fewer train prompts than candidates a prompt may be drawn, and chosen, more than once: red-teaming has one.

    Args:
        train_numbers: [P] prompt numbers of the train prompts.
        counts: [Q] scored rollouts stored now, per prompt number; prompts beyond its end have none.
        successes: [Q] how many of them succeeded.
        num: visits to fill.
        settings: target and number of candidates.
        rng: where chance comes from.
    """
    offsets = candidate_offsets(len(train_numbers), settings.num_candidates * num, rng)
    numbers = train_numbers[offsets]
    draws = thompson_draws(_of_prompts(counts, numbers), _of_prompts(successes, numbers), rng)
    return offsets[nearest(draws, settings.target, num)]


def _of_prompts(values: Ints, numbers: Ints) -> Ints:
    """Values by prompt number; 0 beyond the end of the array."""
    found = np.zeros(len(numbers), dtype=np.int64)
    known = numbers < len(values)
    found[known] = values[numbers[known]]
    return found
