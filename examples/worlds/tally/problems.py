"""Last digits of running totals: `a7b5c8d9=` -> `a7b5=2c8=0d9=9`; the last digit is the answer.

The prompt decides how long a right response is: 4 to 31 terms, so 15 to 123 tokens. Most are short, and a few are many
times as long. A policy that leaves totals out is mostly wrong, so it has no reason to become brief (unlike `chain`).
The labels say which term comes next: without them a small model would have to count.

Prompts fall into fixed splits by a hash of the sorted terms: all orders of the same terms are in one split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from tba.api import Prompt

TASK = "tally"
"""The name of the prompts' task; a recipe defines this task with the scorer kind `last_number`."""
LABELS = "abcdefghijklmnopqrstuvwxyzABCDE"
MIN_TERMS, MAX_TERMS = 4, len(LABELS)
TAIL_EXPONENT = 1.5
"""A prompt has at least n terms with probability (MIN_TERMS / n) ** TAIL_EXPONENT: Pareto's law, cut at MAX_TERMS."""
MAX_RESPONSE_TOKENS = 2 + 4 * (MAX_TERMS - 1) + 1
"""Tokens of the longest right response, end of sequence included."""
SPLITS = MappingProxyType(
    {"heldout": range(12), "validation": range(12, 20), "warmstart": range(20, 55), "train": range(55, 100)}
)
"""Split -> its hash buckets, of 100. `validation` only tells the warm start when to stop."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum."""

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """The prompt."""
        return "".join(f"{label}{term}" for label, term in zip(LABELS, self.terms, strict=False)) + "="

    @property
    def answer(self) -> str:
        """The last number of a right response."""
        return str(sum(self.terms) % 10)

    @property
    def response(self) -> str:
        """The right response."""
        return noisy_response(self, random.Random(0), wrong_digit=0.0)


def split_of(terms: tuple[int, ...]) -> str:
    """Return the split of the terms; it depends on neither their order nor a seed."""
    digest = hashlib.sha256(f"{TASK}:{sorted(terms)}".encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def stream(split: str, seed: int) -> Iterator[Problem]:
    """Yield sums of one split without end, drawn with replacement."""
    rng = random.Random(f"{TASK}:{split}:{seed}")
    while True:
        # the inverse of the tail's law; 1 - u is never 0
        num = min(MAX_TERMS, int(MIN_TERMS * (1 - rng.random()) ** (-1 / TAIL_EXPONENT)))
        terms = tuple(rng.randint(1, 9) for _ in range(num))
        if split_of(terms) == split:
            yield Problem(terms)


def distinct(split: str, count: int, seed: int) -> list[Problem]:
    """Return the first `count` different sums of a stream."""
    found: dict[Problem, None] = {}
    for problem in stream(split, seed):
        if len(found) == count:
            break
        found[problem] = None
    return list(found)


def generate(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return held-out prompts, the same for every seed, followed by training prompts."""
    chosen = [("heldout", problem) for problem in distinct("heldout", num_heldout, 0)]
    chosen += [("train", problem) for problem in distinct("train", num_train, seed)]
    return [
        Prompt(
            prompt_id=f"{TASK}-{'-'.join(map(str, problem.terms))}",
            task=TASK,
            text=problem.text,
            data={"answer": problem.answer},
            split="heldout" if split == "heldout" else "train",
        )
        for split, problem in chosen
    ]


def noisy_response(problem: Problem, rng: random.Random, *, wrong_digit: float) -> str:
    """Return a response with random errors.

    Args:
        wrong_digit: probability that a total is replaced by a random digit.
    """
    total, text = problem.terms[0], f"{LABELS[0]}{problem.terms[0]}"
    for label, term in zip(LABELS[1:], problem.terms[1:], strict=False):
        # an error is carried on, as a person would: one wrong total makes the answer wrong
        total = rng.randrange(10) if rng.random() < wrong_digit else (total + term) % 10
        text += f"{label}{term}={total}"
    return text
