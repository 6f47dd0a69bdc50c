"""Sums of four digits, written step by step: `7+5+8+9=` -> `7+5=12+8=20+9=29`; the last number is the answer.

The policy decides how long a response is. A demonstration may hesitate: write the answer again, `=29`, and again after
that. So the length is 13 to 17 tokens with a long geometric tail, cut at `MAX_RESPONSE_TOKENS`. Hesitation costs time
and changes nothing about the answer of a demonstration; whether a policy goes on to hesitate is left to its training.

Prompts fall into fixed splits by a hash of the sorted digits: all orders of the same digits are in one split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from tba.api import Prompt
from tba.errors import ConfigError

TASK = "chain"
"""The name of the prompts' task; a recipe defines this task with the scorer kind `last_number`."""
NUM_TERMS = 4
MAX_RESPONSE_TOKENS = 128
FIRST_REPEAT, NEXT_REPEAT = 0.4, 0.93
"""Probabilities that a demonstration repeats its answer at all, and that it does so again after each repetition. The
first is below a half, so that greedy responses end; the second makes the long tail."""
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
        return "+".join(map(str, self.terms)) + "="

    @property
    def answer(self) -> str:
        """The last number of a correct response."""
        return str(sum(self.terms))

    @property
    def shortest(self) -> str:
        """The shortest correct response."""
        return _steps(self, random.Random(0), drop_carry=0.0, wrong_digit=0.0)


def split_of(terms: tuple[int, ...]) -> str:
    """Return the split of the digits; it depends on neither their order nor a seed."""
    digest = hashlib.sha256(f"{TASK}:{sorted(terms)}".encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def all_problems(split: str) -> list[Problem]:
    """Return every sum of the split, in a fixed order."""
    return [Problem(terms) for terms in product(range(1, 10), repeat=NUM_TERMS) if split_of(terms) == split]


def stream(split: str, seed: int) -> Iterator[Problem]:
    """Yield sums of one split without end, shuffled again in every round."""
    problems, rng = all_problems(split), random.Random(f"{TASK}:{split}:{seed}")
    while True:
        rng.shuffle(problems)
        yield from problems


def generate(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return held-out prompts, the same for every seed, followed by training prompts.

    Raises:
        ConfigError: more prompts are asked for than the task has.
    """
    prompts: list[Prompt] = []
    for split, count, order_seed in (("heldout", num_heldout, 0), ("train", num_train, seed)):
        problems = all_problems(split)
        if count > len(problems):
            raise ConfigError(f"data.num_{split} is {count}, but task {TASK!r} has {len(problems)} {split} prompts")
        random.Random(f"{split}:{order_seed}").shuffle(problems)
        prompts += [
            Prompt(
                prompt_id=f"{TASK}-{'-'.join(map(str, problem.terms))}",
                task=TASK,
                text=problem.text,
                data={"answer": problem.answer},
                split="heldout" if split == "heldout" else "train",
            )
            for problem in problems[:count]
        ]
    return prompts


def noisy_response(problem: Problem, rng: random.Random, *, drop_carry: float, wrong_digit: float) -> str:
    """Return a response with random errors and hesitations.

    Args:
        drop_carry: probability that an addition with a carry loses it: the total is then 10 too low.
        wrong_digit: probability that a digit of a total is replaced by a random one.
    """
    text = _steps(problem, rng, drop_carry=drop_carry, wrong_digit=wrong_digit)
    repeat, probability = text[text.rindex("=") :], FIRST_REPEAT
    # +1: the end of sequence, which every demonstration has
    while len(text) + len(repeat) + 1 <= MAX_RESPONSE_TOKENS and rng.random() < probability:
        text, probability = text + repeat, NEXT_REPEAT
    return text


def _steps(problem: Problem, rng: random.Random, *, drop_carry: float, wrong_digit: float) -> str:
    total, text = problem.terms[0], str(problem.terms[0])
    for term in problem.terms[1:]:
        carries = total % 10 + term >= 10
        total += term
        if carries and rng.random() < drop_carry:
            total -= 10
        # an error is carried on, as a person would: one wrong total makes the answer wrong
        digits = (str(rng.randrange(10)) if rng.random() < wrong_digit else digit for digit in str(total))
        total = int("".join(digits))
        text += f"+{term}={total}"
    return text
