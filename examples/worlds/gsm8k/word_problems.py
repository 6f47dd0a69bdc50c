"""Word problems of one to four steps, with the columns and the answer format of GSM8K (openai/gsm8k).

    Mia has 4 pens. She buys 8 more. She shares them among 3 friends. How many pens does each friend get?
    <<4+8=12>>12 pens
    <<12/3=4>>4 pens
    #### 4

A family is one way to tell a story. The family `groups` is only in the split `test_new_family`, and all its words are
in other families too. The answers of `sft` are right. Those of `sft_slips` have the errors of `SLIP`, and later steps
use the wrong totals. A model that learns from `sft` and then a little from `sft_slips` knows the arithmetic but often
writes it wrongly. Training by rewards so starts at a low accuracy. The answers of all other splits are right.

Splits are by a hash of family and numbers: the same story with other names or things is in the same split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from examples.worlds.rows import bucket_of, distinct_prompts
from tba.api import Prompt

NAMES = {"Tom": "He", "Sam": "He", "Ben": "He", "Ana": "She", "Mia": "She", "Eva": "She"}
THINGS = ("book", "card", "coin", "cup", "pen", "toy")
BOXES = ("bag", "case", "pack", "tin")
MAX_STEPS, MAX_TOTAL = 4, 40
NEW_FAMILY = "groups"
SPLITS = MappingProxyType(
    {"test": range(10), "validation": range(10, 15), "sft": range(15, 60), "train": range(60, 100)}
)
"""Split -> its hash buckets, of 100."""
NUM_ROWS = MappingProxyType(
    {"sft": 16_000, "sft_slips": 8000, "train": 4000, "validation": 300, "test": 600, "test_new_family": 600}
)
SLIP = 0.75
"""Probability of an error in a hard step. A sum that carries or a difference that borrows is then off by ten. With a
right operand above `EASY_TABLES`, a product is too low by its left factor, and a quotient is one too low. It is above a
half, so that a model that learned from such answers errs when it decodes greedily, and not only when it samples."""
EASY_TABLES = 4
MAX_DRAWS = 50_000
"""Most draws to find one new problem of a split; the tables need at most 653 (in `validation`)."""

MORE = ("{He} buys {n} more.", "{He} finds {n} more.", "{He} gets {n} more.")
FEWER = ("{He} gives {n} to {friend}.", "{He} loses {n}.", "{He} sells {n}.")
SHARE = "{He} shares them among {n} friends."
TRADE = (*(("+", text) for text in MORE), *(("-", text) for text in FEWER))
HAS, EACH_GETS = "How many {unit} does {name} have?", "How many {unit} does each friend get?"


@dataclass(frozen=True, slots=True)
class Family:
    """One way to tell a story: the opening gives the first number or two, events change the total."""

    openings: Sequence[tuple[str, str]]
    """Pairs of an operation and a text; with the operation "" the text gives one number {m}, else two, {m} and {n}."""
    events: Sequence[tuple[str, str]]
    """Pairs of an operation and a text with one number {n}."""
    question: str = HAS
    ending: tuple[str, str] | None = None
    """An event that every story ends with."""
    unit: str = "{thing}s"


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "trade": Family([("", "{name} has {m} {unit}.")], TRADE),
        "rate": Family([("*", "{name} makes {m} {unit} a day for {n} days.")], TRADE),
        "price": Family(
            [("*", "{name} buys {m} {item}s. Each {item} costs {n} dollars.")],
            [("+", "{He} buys a {thing} for {n} dollars."), ("-", "{He} gets {n} dollars back.")],
            question="How many dollars does {name} pay?",
            unit="dollars",
        ),
        "share": Family(
            [("", "{name} has {m} {unit}."), ("*", "{name} makes {m} {unit} a day for {n} days.")],
            TRADE,
            question=EACH_GETS,
            ending=("/", SHARE),
        ),
        "compare": Family(
            [
                ("*", "{friend} has {m} {unit}. {name} has {n} times as many."),
                ("+", "{friend} has {m} {unit}. {name} has {n} more."),
                ("-", "{friend} has {m} {unit}. {name} has {n} fewer."),
            ],
            TRADE,
        ),
        NEW_FAMILY: Family([("*", "{name} has {m} {box}s. Each {box} has {n} {unit}.")], TRADE),
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem."""

    family: str
    question: str
    first: int
    """The total before the first step."""
    steps: tuple[tuple[str, int], ...]
    """Operation and its right operand."""
    unit: str

    @property
    def key(self) -> str:
        """The text that decides the split: the family and the numbers."""
        return f"{self.family}:{self.first}" + "".join(f"{op}{n}" for op, n in self.steps)

    @property
    def is_possible(self) -> bool:
        """Whether every total is a whole number from 1 to MAX_TOTAL."""
        total = self.first
        for op, n in self.steps:
            if op == "/" and total % n:
                return False
            total = result(total, op, n)
            if not 1 <= total <= MAX_TOTAL:
                return False
        return True


def result(left: int, op: str, right: int) -> int:
    """Return `left op right`; a difference below 0 is 0, and a quotient is rounded down."""
    return {"+": left + right, "-": max(0, left - right), "*": left * right, "/": left // right}[op]


def slip(left: int, op: str, right: int) -> int:
    """Return the wrong result of a hard step, as `SLIP` describes it, or the right result of any other step."""
    value = result(left, op, right)
    if op == "+":
        return value - 10 if left % 10 + right >= 10 else value
    if op == "-":
        return value + 10 if left % 10 < right <= left else value
    if right <= EASY_TABLES:
        return value
    return value - left if op == "*" else max(1, value - 1)


def answer(problem: Problem, rng: random.Random, *, slip_rate: float) -> str:
    """Return the answer: a line per step, then `#### ` and the last total.

    Args:
        slip_rate: probability of an error in a hard step; later steps carry it on.
    """
    total, text = problem.first, ""
    for op, n in problem.steps:
        new = slip(total, op, n) if rng.random() < slip_rate else result(total, op, n)
        text += f"<<{total}{op}{n}={new}>>{new} {problem.unit}\n"
        total = new
    return f"{text}#### {total}"


def split_of(problem: Problem) -> str:
    """Return the split of a problem; it depends on no seed."""
    if problem.family == NEW_FAMILY:
        return "test_new_family"
    bucket = bucket_of(f"word problems:{problem.key}")
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def stream(split: str, seed: int) -> Iterator[Problem]:
    """Yield problems of one split; families and numbers of steps are about equally frequent.

    Only the supervised splits (sft, sft_slips) repeat problems; the others have a few times `NUM_ROWS` distinct ones.

    Raises:
        ValueError: the split has no more problems of some family and number of steps.
    """
    rng, seen = random.Random(f"word problems:{split}:{seed}"), set[str]()
    known = [name for name in FAMILIES if (name == NEW_FAMILY) == (split == "test_new_family")]
    while True:
        family, num_steps = rng.choice(known), rng.randint(1, MAX_STEPS)
        # drawn again until the numbers fit, so that long stories are not rarer
        for _ in range(MAX_DRAWS):
            problem = _draw(rng, family, num_steps)
            if (
                problem.is_possible
                and split_of(problem) == split.removesuffix("_slips")
                and (split.startswith("sft") or problem.question not in seen)
            ):
                break
        else:
            raise ValueError(
                f"word problems: after {len(seen):,} different ones, {MAX_DRAWS:,} draws found no new one of split "
                f"{split!r}, family {family!r}, {num_steps} steps; ask for fewer rows (NUM_ROWS)"
            )
        seen.add(problem.question)
        yield problem


def table(split: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a split; those of the test splits and of `validation` are the same for every seed."""
    is_trained_on = split in ("sft", "sft_slips", "train")
    problems, rng = stream(split, seed if is_trained_on else 0), random.Random(f"answers:{split}:{seed}")
    slip_rate = SLIP if split == "sft_slips" else 0.0
    return [
        {
            "question": problem.question,
            "answer": answer(problem, rng, slip_rate=slip_rate),
            "num_steps": len(problem.steps),
            "family": problem.family,
        }
        for problem in islice(problems, NUM_ROWS[split])
    ]


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return prompts of `train` and `test`, the same for every seed."""
    return _prompts(("test",), num_heldout) + _prompts(("train",), num_train, "train")


def prompts_with_new_family(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return the result of `prompts`, and `num_heldout` more held-out prompts, of the new family."""
    new = _prompts(("test_new_family",), num_heldout)
    return prompts(num_train, num_heldout, seed) + new


def prompt_of(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of a prompt, and the data of its reward and of the evaluation."""
    gold = row["answer"].rpartition("#### ")[2]
    return f"{row['question']}\n", {"answer": gold, "num_steps": row["num_steps"], "family": row["family"]}


def _prompts(splits: Sequence[str], count: int, split: Literal["train", "heldout"] = "heldout") -> list[Prompt]:
    rows = (prompt_of(row) for name in splits for row in table(name, 0))
    return distinct_prompts("gsm8k", split, rows, count)


TABLES: Mapping[str, Callable[[int], list[dict[str, Any]]]] = MappingProxyType(
    {split: partial(table, split) for split in NUM_ROWS}
)
"""Split -> its rows, by seed."""


def _draw(rng: random.Random, name: str, num_steps: int) -> Problem:
    family = FAMILIES[name]
    num_events = num_steps - (family.ending is not None)
    # an opening with two numbers is a step of its own
    openings = [one for one in family.openings if num_events or not one[0]]
    op, text = rng.choice(openings)
    person, friend = rng.sample(list(NAMES), 2)
    thing, box = rng.choice(THINGS), rng.choice(BOXES)
    words = {"name": person, "He": NAMES[person], "friend": friend, "thing": thing, "box": box}
    words |= {"item": rng.choice(THINGS + BOXES), "unit": family.unit.format(thing=thing)}
    first = rng.randint(2, 9) if op == "*" else rng.randint(2, 20)
    n = rng.randint(2, 9)
    steps, texts = [(op, n)] if op else [], [text.format(m=first, n=n, **words)]
    events = [rng.choice(family.events) for _ in range(num_events - len(steps))]
    for op, text in [*events, *([family.ending] if family.ending else [])]:
        n = rng.randint(2, 9)
        steps.append((op, n))
        texts.append(text.format(n=n, **words))
    question = " ".join([*texts, family.question.format(**words)])
    return Problem(family=name, question=question, first=first, steps=tuple(steps), unit=words["unit"])
