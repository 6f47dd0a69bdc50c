"""`python -m examples.worlds.guess_number.prepare`: make the starting model of guess_number.toml."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from examples.worlds.conversations import World, prepare, says
from examples.worlds.guess_number.world import TASK, GuessNumber, prompts
from examples.worlds.training import Steps
from tba.environments import Reply

COUNTS, MISHEARD = 0.75, 0.07
"""Shares of the slips: to begin with the lowest number and count, and to take an answer for the other one."""


def player(messages: Sequence[dict[str, Any]], rng: random.Random, slip: float) -> Reply:
    """Guess the middle of what is left; carelessly, count."""
    low, high = lowest, _ = [int(number) for number in re.findall(r"\d+", messages[0]["content"])]
    guesses = [int(said["content"]) for said in messages[1::2]]
    counts = guesses[0] == lowest if guesses else rng.random() < slip * COUNTS
    if counts:
        return says(str(lowest + len(guesses)))
    for number, guess in enumerate(guesses):
        if number + 1 < len(guesses):  # the next guess tells what was heard
            is_higher = guesses[number + 1] > guess
        else:
            is_higher = (messages[-1]["content"] == "higher") != (rng.random() < slip * MISHEARD)
        low, high = (guess + 1, high) if is_higher else (low, guess - 1)
    return says(str((low + high) // 2))


WORLD = World(
    name=TASK,
    prompts=prompts,
    player=player,
    environment=GuessNumber,
    clean=Steps(num_steps=180, batch_size=64, rate=3e-3, warmup_steps=20, decay_steps=60),
    noisy=Steps(num_steps=40, batch_size=64, rate=1e-3),
    layers=3,
    num_clean=4000,
)

if __name__ == "__main__":
    prepare(WORLD)
