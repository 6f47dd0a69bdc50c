"""`python -m examples.worlds.calculator.prepare`: make the starting model of calculator.toml."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from examples.worlds.calculator.world import TASK, add, multiply, prompts
from examples.worlds.conversations import World, calls, prepare, says
from examples.worlds.training import Steps
from tba.environments import Reply

NO_CALL, WRONG_TOOL, WRONG_DIGIT = 0.6, 0.15, 0.1
"""Shares of the slips: no call but the first number, the other tool, and a digit of an argument that is another."""


def player(messages: Sequence[dict[str, Any]], rng: random.Random, slip: float) -> Reply:
    """Call the tool that is asked for, then say what it answered."""
    if messages[-1]["role"] == "tool":
        return says(messages[-1]["content"])
    if rng.random() < slip * NO_CALL:
        return says(messages[0]["content"].split()[2])
    is_sum = ("+" in messages[0]["content"]) != (rng.random() < slip * WRONG_TOOL)
    a, b = (
        int("".join(rng.choice("123456789") if rng.random() < slip * WRONG_DIGIT else digit for digit in number))
        for number in re.findall(r"\d+", messages[0]["content"])
    )
    return calls("add" if is_sum else "multiply", a=a, b=b)


WORLD = World(
    name=TASK,
    prompts=prompts,
    player=player,
    tools=(add, multiply),
    clean=Steps(num_steps=140, batch_size=64, rate=3e-3, warmup_steps=20, decay_steps=60),
    noisy=Steps(num_steps=40, batch_size=64, rate=1e-3),
)

if __name__ == "__main__":
    prepare(WORLD)
