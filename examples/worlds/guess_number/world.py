"""A secret number between two others: the environment answers `higher` or `lower`, and pays for a guess that hits it.

Of 31 numbers halving finds each within 5 guesses. Nobody else finds most of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from examples.worlds.rows import Split, is_of, prompts_of_both
from tba.api import Prompt
from tba.environments import Reply, Reset, Step

TASK = "guess_number"
WIDTH, NUM_GUESSES = 31, 5
LOWS = tuple(low for low in range(101, 1000, 10) if low % 100 < 70)
"""No range crosses a hundred: so small a model learns the rest of the arithmetic in a minute."""


class GuessNumber:
    """One secret, which the seed says together with the range."""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Choose the secret, and ask for it."""
        _, self.secret = drawn(seed)
        self.num_left = NUM_GUESSES
        return Reset([question(seed)])

    async def step(self, reply: Reply) -> Step:
        """Compare a guess with the secret."""
        self.num_left -= 1
        guess = int(reply.content) if reply.content.isdecimal() and len(reply.content) < 5 else None
        if guess == self.secret:
            return Step(reward=1.0, done=True, info={"stop_condition": "found"})
        if self.num_left == 0:
            return Step(reward=0.0, done=True, info={"stop_condition": "no_guess_left"})
        return Step(["no number" if guess is None else "higher" if guess < self.secret else "lower"])

    async def close(self) -> None:
        """Nothing is held."""


def drawn(seed: int) -> tuple[int, int]:
    """Return the lowest number and the secret of a seed."""
    low = LOWS[seed // WIDTH % len(LOWS)]
    return low, low + seed % WIDTH


def question(seed: int) -> str:
    """Return the first message of a seed."""
    low, _ = drawn(seed)
    return f"Guess a number from {low} to {low + WIDTH - 1}."


def rows(split: Split, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all questions of a split in random order. A secret of a range is in one split."""
    order = list(range(WIDTH * len(LOWS)))
    random.Random(seed).shuffle(order)
    return ((f"{question(each)} (seed {each})", {"seed": each}) for each in order if is_of(split, f"{TASK}:{each}"))


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return held-out prompts, the same for every seed, and others to train on."""
    return prompts_of_both(TASK, rows, num_train=num_train, num_heldout=num_heldout, seed=seed)
