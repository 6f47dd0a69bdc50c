"""Sums and products that the policy cannot do by itself: it calls a tool, and says what the tool answered.

There is no environment. An episode ends with the first reply that calls no tool, and a scorer reads that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.worlds.rows import Split, is_of, prompts_of_both
from tba.api import Prompt

TASK = "calculator"
SHOWN = [
    {"role": "system", "content": "Tools: add(a, b), multiply(a, b)."},
    {"role": "user", "content": "What is 12 + 30?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>',
    },
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "42"},
]
"""The tools and one call, for a pretrained model whose chat template writes no tools."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def rows(split: Split, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield questions of one split without end. Two numbers are in one split, whatever is asked of them."""
    rng = random.Random(f"{TASK}:{split}:{seed}")
    while True:
        a, b, sign = rng.randint(100, 999), rng.randint(100, 999), rng.choice("+*")
        if is_of(split, f"{TASK}:{sorted((a, b))}"):
            yield f"What is {a} {sign} {b}?", {"answer": str(add(a, b) if sign == "+" else multiply(a, b))}


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return held-out prompts, the same for every seed, and others to train on."""
    return prompts_of_both(TASK, rows, num_train=num_train, num_heldout=num_heldout, seed=seed)


def chats(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return the same prompts, each behind an example of a call."""
    return [
        Prompt.model_validate({**each.document(), "messages": [*SHOWN, {"role": "user", "content": each.text}]})
        for each in prompts(num_train, num_heldout, seed)
    ]
