"""`python -m examples.worlds.lookup.prepare`: make the starting model of lookup.toml."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from examples.worlds.conversations import World, calls, prepare, says
from examples.worlds.lookup.world import TASK, Lookup, prompts
from examples.worlds.training import Steps
from tba.environments import Reply

ONE_HOP, WRONG_KEY = 0.5, 0.3
"""Shares of the slips: only one of the two searches, and another key in a search."""


def player(messages: Sequence[dict[str, Any]], rng: random.Random, slip: float) -> Reply:
    """Find the second person by the first, then what is wanted by the second, and answer."""
    wanted, relation, name = re.findall(r"(\w+) of the (\w+) of (\w+)", messages[0]["content"])[0]
    found = [each["content"] for each in messages if each["role"] == "tool"]
    if len(found) == 2 or (found and rng.random() < slip * ONE_HOP):
        return says(found[-1])
    if rng.random() < slip * WRONG_KEY:
        relation, wanted = wanted, relation
    return calls("find", name=found[0] if found else name, key=wanted if found else relation)


WORLD = World(
    name=TASK,
    prompts=prompts,
    player=player,
    environment=Lookup,
    clean=Steps(num_steps=120, batch_size=64, rate=3e-3, warmup_steps=20, decay_steps=60),
    noisy=Steps(num_steps=40, batch_size=64, rate=1e-3),
)

if __name__ == "__main__":
    prepare(WORLD)
