"""Ordinary answers to maths questions, all different, so that nothing comes from the cache."""

from __future__ import annotations

import random
from collections.abc import Callable

from tba.api import ScoreItem

Pair = tuple[str, str]
"""A gold answer and a response."""


def maths(num_items: int, *, seed: int, task: str = "math") -> list[ScoreItem]:
    """Completions that end in a boxed answer, of KINDS in their shares; half of them are right.

    Args:
        num_items: how many.
        seed: of the numbers in them.
    """
    draw = random.Random(seed)
    items = []
    for number in range(num_items):
        (kind,) = draw.choices(list(KINDS), weights=list(KINDS.values()))
        gold, answer = kind(draw)
        if draw.random() < 0.5:
            _, answer = kind(draw)
        response = (
            f"We set up the equation and simplify, step by step. Case {seed}-{number}: it follows that $x = {answer}$, "
            f"so the answer is $\\boxed{{{answer}}}$."
        )
        items.append(
            ScoreItem(item_id=f"{task}-{number}", task=task, prompt="Find x.", response=response, data={"answer": gold})
        )
    return items


def additions(num_items: int) -> list[ScoreItem]:
    """Items of the inline task `addition`."""
    return [
        ScoreItem(item_id=str(n), task="addition", prompt=f"{n}+1=", response=f"{n + 1}", data={"answer": str(n + 1)})
        for n in range(num_items)
    ]


def _integer(draw: random.Random) -> Pair:
    value = draw.randint(-5000, 5000)
    return str(value), f"{value:,}".replace(",", "{,}")


def _fraction(draw: random.Random) -> Pair:
    top, bottom, factor = draw.randint(1, 99), draw.randint(2, 99), draw.randint(1, 4)
    return f"\\frac{{{top}}}{{{bottom}}}", f"\\frac{{{top * factor}}}{{{bottom * factor}}}"


def _decimal(draw: random.Random) -> Pair:
    value = draw.randint(1, 9999)
    return f"\\frac{{{value}}}{{100}}", f"{value / 100:.2f}"


def _root(draw: random.Random) -> Pair:
    outside, inside = draw.randint(2, 9), draw.choice([2, 3, 5, 7, 11, 13])
    return f"{outside}\\sqrt{{{inside}}}", f"\\sqrt{{{outside * outside * inside}}}"


def _polynomial(draw: random.Random) -> Pair:
    one, two, three = (draw.randint(1, 30) for _ in range(3))
    return f"{one}x^2+{two}x+{three}", f"{three} + {one}x^2 + {two}x"


def _pair(draw: random.Random) -> Pair:
    one, two = draw.randint(-99, 99), draw.randint(-99, 99)
    return f"({one},{two})", f"({one}, {two})"


def _interval(draw: random.Random) -> Pair:
    low, width = draw.randint(-50, 50), draw.randint(1, 50)
    return f"[{low},{low + width})", f"[{low}, {low + width})"


KINDS: dict[Callable[[random.Random], Pair], float] = {
    _integer: 0.63,
    _fraction: 0.13,
    _root: 0.07,
    _polynomial: 0.07,
    _pair: 0.05,
    _interval: 0.03,
    _decimal: 0.02,
}
"""Shares of answers, chosen after competition problems: most answers are integers. An assumption of this benchmark."""
