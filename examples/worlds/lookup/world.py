"""Questions about people whom only a search knows, and each needs two searches: one leads to the name for the other.

Every seed has people of its own, so nothing can be known by heart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from examples.worlds.rows import Split, is_of, prompts_of_both
from tba.api import Prompt
from tba.environments import Reply, Reset, Step, ToolError

TASK = "lookup"
NAMES = ("Ann", "Bo", "Cy", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jo", "Kim", "Lee", "Mia", "Ned", "Ola", "Pam")
CITIES = ("Bern", "Cork", "Kiel", "Lyon", "Nice", "Oslo", "Riga", "Rome")
RELATIONS = ("boss", "friend")


class Town:
    """The people of a seed, and the question that it asks."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{TASK}:{seed}")
        self.people = dict[str, dict[str, str]]()
        for name in NAMES:
            boss, friend = rng.sample([other for other in NAMES if other != name], 2)
            self.people[name] = {"boss": boss, "friend": friend, "city": rng.choice(CITIES)}
        self.first, self.relation = rng.choice(NAMES), rng.choice(RELATIONS)
        self.wanted = rng.choice([*RELATIONS, "city"])
        self.question = f"What is the {self.wanted} of the {self.relation} of {self.first}?"
        self.second = self.people[self.first][self.relation]
        self.answer = self.people[self.second][self.wanted]


class Lookup:
    """Pays 1 for the right answer, which is the first reply that calls no tool."""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Make the people of the seed."""
        self.town = Town(seed)
        return Reset([self.town.question], [self.find])

    async def step(self, reply: Reply) -> Step:
        """Compare the answer."""
        return Step(reward=float(reply.content == self.town.answer), done=True, info={"stop_condition": "answered"})

    async def close(self) -> None:
        """Nothing is held."""

    async def find(self, name: str, key: str) -> str:
        """Tell one thing about a person."""
        person = self.town.people.get(name)
        if person is None:
            raise ToolError(f"no {name}")
        if key not in person:
            raise ToolError(f"no {key}")
        return person[key]


def rows(split: Split, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield questions of one split without end. All that have the same way to the same answer are in one split."""
    rng = random.Random(f"{TASK}:{split}:{seed}")
    while True:
        town = Town(number := rng.randrange(10**9))
        way = f"{TASK}:{town.question} {town.second} {town.answer}"
        if is_of(split, way):
            yield f"{town.question} (seed {number})", {"seed": number}


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return held-out prompts, the same for every seed, and others to train on."""
    return prompts_of_both(TASK, rows, num_train=num_train, num_heldout=num_heldout, seed=seed)
