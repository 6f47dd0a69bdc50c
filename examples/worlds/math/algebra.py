r"""Algebra and arithmetic with boxed answers, in the columns of hendrycks MATH: problem, level, solution, type.

Five families of problems, one of each level. A solution is a few steps and ends in `The answer is $\boxed{...}$.`; an
answer is a whole number, a fraction, a set or an interval. Numbers are small: a model of 0.4 M parameters has to learn
what their sums are.

The solutions of the split `sft` are written by pupils who err. They lose minus signs, are off by one or two, and forget
to turn an inequality. Later steps use the wrong results. More steps and signs mean more errors.
All other solutions are right; a model learns from those of `clean` first.

Problems fall into splits by a hash of their sorted numbers: all orders of the same numbers are in one split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Any

from examples.worlds.rows import bucket_of, distinct_prompts
from tba.api import Prompt

Numbers = tuple[int, ...]
CHAT = "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
"""Template of a prompt, in the format of Qwen's chats."""
END = "<|im_end|>"
"""Ends every response."""
SPLITS = MappingProxyType(
    {
        "test": range(25),
        "validation": range(25, 33),
        "clean": range(33, 75),
        "sft": range(75, 83),
        "train": range(83, 100),
    }
)
"""Split -> its hash buckets, of 100."""
SIZES = MappingProxyType({"test": 200, "validation": 50, "clean": 20_000, "sft": 4_000, "train": 3_000})
"""Split -> its number of rows, the same from every family. Those of `test` and `validation` are distinct."""
DISTINCT = ("test", "validation")
"""Splits whose problems are distinct, and the same for every seed."""
LOST_SIGN, OFF_BY, FORGOTTEN_TURN = 0.7, 0.15, 0.7
"""Probabilities of a pupil's errors, for each step where they can happen. A lost sign is more likely than a kept one.
So a model that learned from pupils often errs when it decodes greedily, and not only when it samples."""
RELATIONS = ("<", ">", r"\le", r"\ge")


@dataclass(slots=True)
class Pupil:
    """The writer of a solution: makes random errors, or none without `rng`."""

    rng: random.Random | None = None

    def note(self, value: int | Fraction) -> Fraction:
        """Return the result of a step as the pupil writes it: `value`, or an error."""
        value = Fraction(value)
        if self.rng is None:
            return value
        if value < 0 and self.rng.random() < LOST_SIGN:
            value = -value
        if self.rng.random() < OFF_BY:
            value += self.rng.choice((-2, -1, 1, 2))
        return value

    def turns(self) -> bool:
        """Return whether the pupil turns an inequality that was divided by a negative number."""
        return self.rng is None or self.rng.random() >= FORGOTTEN_TURN


def number(value: int | Fraction) -> str:
    r"""Return a number in LaTeX: `-3`, `\frac{1}{2}` or `-\frac{1}{2}`."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def spaced(relation: str) -> str:
    r"""Return a relation as it stands before a number or letter: `\le` needs a space."""
    return f"{relation} " if relation.startswith("\\") else relation


def _difference(left: int | Fraction, right: int | Fraction) -> str:
    """Return the text of a difference: `7-3` for 7 and 3, `7+3` for 7 and -3."""
    return number(left) + terms((-right, ""), goes_on=True) if right else number(left)


def terms(*parts: tuple[int | Fraction, str], goes_on: bool = False) -> str:
    """Return a sum such as `2x-3` of (coefficient, what it multiplies); parts with the coefficient 0 are left out.

    Args:
        goes_on: whether the sum follows other parts, so that it must begin with a sign.
    """
    text = ""
    for coefficient, unknown in parts:
        if coefficient:
            size = number(abs(coefficient)) if abs(coefficient) != 1 or not unknown else ""
            text += f"{'-' if coefficient < 0 else '+' if text or goes_on else ''}{size}{unknown}"
    return text or ("" if goes_on else "0")


def interval(relation: str, end: Fraction) -> str:
    """Return in LaTeX the interval of all x for which `x relation end` holds."""
    is_closed = relation in (r"\le", r"\ge")
    if relation in ("<", r"\le"):
        return rf"(-\infty,{number(end)}{']' if is_closed else ')'}"
    return rf"{'[' if is_closed else '('}{number(end)},\infty)"


def turned(relation: str) -> str:
    """Return the reversed relation: `>` for `<`, for example."""
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[relation]


def the_set(*members: Fraction) -> str:
    """Return a set in LaTeX, in ascending order and without repetitions."""
    return rf"\{{{','.join(map(number, sorted(set(members))))}\}}"


Written = tuple[str, str, str]
"""Problem, the steps of a solution, and its answer."""


def _sum(numbers: Numbers, pupil: Pupil) -> Written:
    first, second, third = numbers
    half = pupil.note(first + second)
    value = number(pupil.note(half + third))
    text = terms((first, ""), (second, ""), (third, ""))
    return f"Compute ${text}$.", f"${text}={number(half)}{terms((third, ''), goes_on=True)}={value}$.", value


def _linear(numbers: Numbers, pupil: Pupil) -> Written:
    factor, root, added = numbers
    result = factor * root + added
    product = pupil.note(result - added)
    value = number(pupil.note(product / factor))
    return (
        f"Solve ${terms((factor, 'x'), (added, ''))}={result}$.",
        f"${factor}x={_difference(result, added)}={number(product)}$, $x={value}$.",
        value,
    )


def _fractions(numbers: Numbers, pupil: Pupil) -> Written:
    bottom, top, other = numbers
    over = pupil.note(top + other)
    sign = "-" if other < 0 else "+"
    return (
        rf"Compute $\frac{{{top}}}{{{bottom}}}{sign}\frac{{{abs(other)}}}{{{bottom}}}$.",
        rf"$\frac{{{top}{sign}{abs(other)}}}{{{bottom}}}=\frac{{{over}}}{{{bottom}}}$.",
        number(over / bottom),
    )


def _inequality(numbers: Numbers, pupil: Pupil) -> Written:
    factor, root, added, at = numbers
    relation, result = RELATIONS[at], factor * root + added
    product = pupil.note(result - added)
    end = pupil.note(product / factor)
    found = turned(relation) if factor < 0 and pupil.turns() else relation
    return (
        f"Solve ${terms((factor, 'x'), (added, ''))}{spaced(relation)}{result}$ for an interval.",
        f"${factor}x{spaced(relation)}{_difference(result, added)}$, ${factor}x{spaced(relation)}{number(product)}$, "
        f"$x{spaced(found)}{number(end)}$.",
        interval(found, end),
    )


def _square(numbers: Numbers, pupil: Pupil) -> Written:
    added, root, more = numbers
    left, square = terms((1, "x"), (added, "")), pupil.note(root * root)
    roots = [pupil.note(side - added) for side in (root, -root)]
    steps = f"$({left})^2={_difference(root * root + more, more)}={number(square)}$"
    for side, found in zip((root, -root), roots, strict=True):
        steps += f"{' or' if side < 0 else ','} $x={_difference(side, added)}={number(found)}$"
    return f"Solve $({left})^2{terms((more, ''), goes_on=True)}={root * root + more}$.", f"{steps}.", the_set(*roots)


def _not_zero(rng: random.Random, most: int) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, most)


def _small(draw: Callable[[random.Random], Numbers], *values: Callable[[Numbers], int]) -> Callable[..., Numbers]:
    """Return a function that repeats `draw` until each of `values` gives a number of one digit."""

    def drawn(rng: random.Random) -> Numbers:
        numbers = draw(rng)
        while any(abs(value(numbers)) > 9 for value in values):
            numbers = draw(rng)
        return numbers

    return drawn


def _product(numbers: Numbers) -> int:
    return numbers[0] * numbers[1]


def _result(numbers: Numbers) -> int:
    return numbers[0] * numbers[1] + numbers[2]


@dataclass(frozen=True, slots=True)
class Family:
    """Problems of one kind."""

    name: str
    level: int
    type: str
    write: Callable[[Numbers, Pupil], Written]
    draw: Callable[[random.Random], Numbers]


FAMILIES = (
    Family(
        "fractions",
        1,
        "Prealgebra",
        _fractions,
        # a prime bottom: what is left is in lowest terms, or whole
        _small(lambda rng: (rng.choice((5, 7)), rng.randint(1, 9), _not_zero(rng, 9)), lambda it: it[1] + it[2]),
    ),
    Family(
        "sum",
        2,
        "Prealgebra",
        _sum,
        _small(
            lambda rng: (rng.randint(1, 6), _not_zero(rng, 6), _not_zero(rng, 6)),
            lambda it: it[0] + it[1],
            lambda it: sum(it),
        ),
    ),
    Family(
        "linear",
        3,
        "Algebra",
        _linear,
        _small(lambda rng: (rng.randint(2, 4), rng.randint(-4, 4), _not_zero(rng, 6)), _product, _result),
    ),
    Family(
        "square",
        4,
        "Algebra",
        _square,
        _small(lambda rng: (_not_zero(rng, 6), rng.randint(1, 3), _not_zero(rng, 6)), lambda it: it[1] ** 2 + it[2]),
    ),
    Family(
        "inequality",
        5,
        "Intermediate Algebra",
        _inequality,
        _small(
            lambda rng: (
                rng.choice((-1, 1)) * rng.randint(2, 4),
                rng.randint(-4, 4),
                _not_zero(rng, 6),
                rng.randrange(4),
            ),
            _product,
            _result,
        ),
    ),
)


def split_of(family: Family, numbers: Numbers) -> str:
    """Return the split of a problem; it depends on neither the order of its numbers nor a seed."""
    bucket = bucket_of(f"{family.name}:{sorted(numbers)}")
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def row(family: Family, numbers: Numbers, pupil: Pupil) -> dict[str, Any]:
    """Return a problem with the solution of a pupil, in the columns of hendrycks MATH."""
    problem, steps, answer = family.write(numbers, pupil)
    solution = rf"{steps} The answer is $\boxed{{{answer}}}$."
    return {"problem": problem, "level": f"Level {family.level}", "solution": solution, "type": family.type}


def table(split: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one split; those of `test` and `validation` are the same for every seed."""
    rng = random.Random(f"algebra:{split}:{0 if split in DISTINCT else seed}")
    pupil = Pupil(rng if split == "sft" else None)
    drawn = [_draw(family, split, SIZES[split] // len(FAMILIES), rng) for family in FAMILIES]
    # the families in turn, so that the first rows of a table are of all of them
    return [
        row(family, numbers, pupil)
        for turn in zip(*drawn, strict=True)
        for family, numbers in zip(FAMILIES, turn, strict=True)
    ]


def _draw(family: Family, split: str, count: int, rng: random.Random) -> list[Numbers]:
    found: list[Numbers] = []
    while len(found) < count:
        numbers = family.draw(rng)
        if split_of(family, numbers) == split and (split not in DISTINCT or numbers not in found):
            found.append(numbers)
    return found


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return prompts of `test` and `train`, the same for every seed."""
    heldout = distinct_prompts("math", "heldout", map(prompt_of, table("test", 0)), num_heldout)
    return heldout + distinct_prompts("math", "train", map(prompt_of, table("train", 0)), num_train)


def prompt_of(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of a prompt, and the data of its reward and of the evaluation."""
    gold = row["solution"].removesuffix("}$.").rpartition(r"\boxed{")[2]
    return CHAT.format(problem=row["problem"]), {"answer": gold, "level": row["level"]}


TABLES: Mapping[str, Callable[[int], list[dict[str, Any]]]] = MappingProxyType(
    {split: partial(table, split) for split in SIZES}
)
"""Split -> the function that makes its rows from a seed."""
