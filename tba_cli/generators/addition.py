"""Two-digit addition, the answer written least significant digit first: `47+85=` -> `231` (132 read backwards).

A hash of the unordered pair of operands decides the split of a prompt, whatever the seed. So a prompt and its mirror
image are never in two splits. Neither the warm start nor training sees the prompts of an evaluation.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from tba.api import Prompt
from tba.errors import ConfigError

TASK = "addition"
REWARD = "exact"  # written backwards, a leading zero is a digit like any other
NUM_DIGITS = 2
CHARACTERS = "0123456789+="
"""All characters of prompts and answers; each is a token of the starting model."""
SPLITS = MappingProxyType(
    {"heldout": range(10), "validation": range(10, 15), "warmstart": range(15, 50), "train": range(50, 100)}
)
"""For each split its hash buckets, out of 100. The warm start uses `validation` only to know when to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One sum of two numbers."""

    left: int
    right: int

    @property
    def text(self) -> str:
        """The prompt."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The only correct answer: the digits of the sum, backwards."""
        return str(self.left + self.right)[::-1]


def split_of(left: int, right: int) -> str:
    """Return the split of the unordered pair of operands; it depends on no seed."""
    low, high = sorted((left, right))
    digest = hashlib.sha256(f"addition:{low}+{high}".encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def all_problems(split: str) -> list[Problem]:
    """Return every sum of the split, in a fixed order."""
    operands = range(10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS)
    return [Problem(left=a, right=b) for a in operands for b in operands if split_of(a, b) == split]


def stream(split: str, seed: int) -> Iterator[Problem]:
    """Yield the sums of one split again and again without end, shuffled anew in every round."""
    problems, rng = all_problems(split), random.Random(f"{split}:{seed}")
    while True:
        rng.shuffle(problems)
        yield from problems


def generate(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return prompts of both splits; the held-out ones come first and are the same for every seed."""
    prompts: list[Prompt] = []
    for split, count, order_seed in (("heldout", num_heldout, 0), ("train", num_train, seed)):
        problems = all_problems(split)
        if count > len(problems):
            raise ConfigError(f"data.num_{split} is {count}, but task {TASK!r} has {len(problems)} {split} prompts")
        random.Random(f"{split}:{order_seed}").shuffle(problems)
        prompts += [
            Prompt(
                prompt_id=f"{TASK}-{problem.left}-{problem.right}",
                task=REWARD,
                text=problem.text,
                data={"answer": problem.answer},
                split="heldout" if split == "heldout" else "train",
            )
            for problem in problems[:count]
        ]
    return prompts


def noisy_answer(problem: Problem, rng: random.Random, *, drop_carry: float, wrong_digit: float) -> str:
    """Return an answer with errors.

    Args:
        drop_carry: probability that a carry is forgotten.
        wrong_digit: probability that a digit is replaced by a random one.
    """
    left, right, carry, written = problem.left, problem.right, 0, ""
    while left or right or carry:
        column = left % 10 + right % 10 + carry
        digit = rng.randrange(10) if rng.random() < wrong_digit else column % 10
        written += str(digit)
        carry = column // 10
        if carry and rng.random() < drop_carry:
            carry = 0
        left, right = left // 10, right // 10
    return written
