"""`python -m examples.worlds.tally.prepare`: make the starting model of tally.toml."""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.worlds.starter import Lesson, prepare
from examples.worlds.tally.problems import LABELS, distinct, noisy_response, stream
from tba_cli.starter_models.starting_model import Pair, Shape

WRONG_DIGIT = 0.15
"""Noise of the demonstrations of the second phase."""


def demonstrations(seed: int) -> tuple[Iterator[Pair], Iterator[Pair]]:
    """Return clean and noisy pairs; both take from one stream, so the second phase goes on where the first ended."""
    problems, rng = stream("warmstart", seed), random.Random(seed)
    clean = ((p.text, p.response) for p in problems)
    return clean, ((p.text, noisy_response(p, rng, wrong_digit=WRONG_DIGIT)) for p in problems)


LESSON = Lesson(
    characters=f"0123456789={LABELS}",
    max_length_tokens=256,
    shape=Shape(
        hidden=256,
        layers=4,
        # with 4 it took longer to find the term of a label (one run each, at two rates)
        heads=8,
        intermediate=640,
        initializer_range=0.05,
        clean_learning_rate=2e-3,
        noisy_learning_rate=1e-3,
    ),
    batch_size=32,
    num_micro_batches=4,
    is_end_judged=True,
    target_accuracy=0.8,
    max_steps=800,
    noise_steps=40,
    validation=lambda: [(p.text, p.response) for p in distinct("validation", 100, 0)],
    demonstrations=demonstrations,
)

if __name__ == "__main__":
    prepare("tally", lambda args: LESSON, sizes=("3m",))
