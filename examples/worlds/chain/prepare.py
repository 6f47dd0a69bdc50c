"""`python -m examples.worlds.chain.prepare`: make the starting model of chain.toml."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import MappingProxyType

from examples.worlds.chain.problems import all_problems, noisy_response, stream
from examples.worlds.starter import Lesson, prepare
from tba_cli.starter_models.starting_model import Pair, Shape

CHARACTERS = "0123456789+="
DROP_CARRY, WRONG_DIGIT = 0.2, 0.08
"""Noise of the demonstrations of the second phase."""
SHAPES = MappingProxyType(
    {
        "3m": Shape(
            hidden=256,
            layers=4,
            heads=4,
            intermediate=640,
            initializer_range=0.05,
            clean_learning_rate=2e-3,
            noisy_learning_rate=1e-3,
        ),
        "0.3m": Shape(
            hidden=96,
            layers=3,
            heads=4,
            intermediate=256,
            initializer_range=0.08,
            clean_learning_rate=4e-3,
            noisy_learning_rate=2e-3,
        ),
    }
)


def demonstrations(seed: int) -> tuple[Iterator[Pair], Iterator[Pair]]:
    """Return clean and noisy pairs; both take from one stream, so the second phase goes on where the first ended."""
    problems, rng = stream("warmstart", seed), random.Random(seed)
    clean = ((p.text, p.shortest) for p in problems)
    return clean, ((p.text, noisy_response(p, rng, drop_carry=DROP_CARRY, wrong_digit=WRONG_DIGIT)) for p in problems)


def lesson(size: str = "3m") -> Lesson:
    """Return the lesson of a size."""
    return Lesson(
        characters=CHARACTERS,
        max_length_tokens=256,
        shape=SHAPES[size],
        batch_size=64,
        num_micro_batches=4,
        is_end_judged=False,
        target_accuracy=0.8,
        # the small size learns more slowly
        max_steps=400 if size == "3m" else 800,
        noise_steps=40,
        validation=lambda: [(p.text, p.shortest) for p in all_problems("validation")],
        demonstrations=demonstrations,
    )


if __name__ == "__main__":
    prepare("chain", lambda args: lesson(args.size), sizes=tuple(SHAPES))
