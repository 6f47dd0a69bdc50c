"""Parts of the worlds in which a smaller model learns in fewer steps: prompts of one kind alone."""

from __future__ import annotations

from examples.worlds.gsm8k import word_problems
from examples.worlds.math import algebra
from examples.worlds.rows import distinct_prompts
from tba.api import Prompt


def one_step_problems(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return word problems of one step; the held-out ones have other names and things, and numbers that are known.

    A model this small learns sums by heart, and few problems have one step.
    """
    rows = [row for row in word_problems.TABLES["train"](0) if row["num_steps"] == 1]
    made = [word_problems.prompt_of(row) for row in rows]
    heldout = distinct_prompts("gsm8k", "heldout", made[:num_heldout], num_heldout)
    return heldout + distinct_prompts("gsm8k", "train", made[num_heldout:], num_train)


def squares(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return the algebra of level 4: squares, answered with a set."""
    rows = {name: table(0) for name, table in algebra.TABLES.items() if name in ("test", "validation", "train")}
    made = {name: [algebra.prompt_of(row) for row in rows[name] if row["level"] == "Level 4"] for name in rows}
    heldout = distinct_prompts("math", "heldout", [*made["test"], *made["validation"]], num_heldout)
    return heldout + distinct_prompts("math", "train", made["train"], num_train)
