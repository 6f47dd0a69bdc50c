"""What the starting models learn from: for every task with a warm start, its demonstrations and the shape of its model.

A demonstration is a prompt with a response. Clean ones are right; the noisy ones of the second phase err, and their
errors set the accuracy at the start of training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tba.config.sections import WarmStartSection
from tba.errors import ConfigError
from tba_cli.generators import addition, chain, tally

Pair = tuple[str, str]
"""Prompt and response."""
NUM_VALIDATION = 300
"""Most problems of a validation."""
MAX_SHOWN_UNKNOWN = 5
"""At most this many things are named that a tokenizer does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama with tied embeddings, and the learning rates at which it learns soonest."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    initializer_range: float
    clean_learning_rate: float
    noisy_learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The warm start of one task."""

    characters: str
    """One token each."""
    max_length_tokens: int
    """Of prompt and response, the longest that the model is made for."""
    shapes: Mapping[str, Shape]
    """By `model.warm_start.size`; the first one is the default."""
    batch_size: int
    num_micro_batches: int
    """Of about the same lengths each: responses of very different lengths would be padding for the most part."""
    is_end_judged: bool
    """Whether validation asks for the end of the response too. Not where a right response may go on."""
    validation: Callable[[], list[Pair]]
    """Right answers of the validation split. They are shuffled, and the first `NUM_VALIDATION` count."""
    demonstrations: Callable[[WarmStartSection, int], tuple[Iterator[Pair], Iterator[Pair]]]
    """Clean and noisy pairs without end, for a seed."""

    def shape(self, size: str | None) -> Shape:
        """Return the shape of a size.

        Raises:
            ConfigError: the task does not have it.
        """
        if size is None:
            return next(iter(self.shapes.values()))
        if size not in self.shapes:
            raise ConfigError(f"model.warm_start.size is {size!r}; this task has the sizes {', '.join(self.shapes)}")
        return self.shapes[size]


def _addition_demonstrations(section: WarmStartSection, seed: int) -> tuple[Iterator[Pair], Iterator[Pair]]:
    problems, rng = addition.stream("warmstart", seed), random.Random(seed)
    clean = ((p.text, p.answer) for p in problems)
    noise = {"drop_carry": section.drop_carry, "wrong_digit": section.wrong_digit}
    # both take from one stream, so that the second phase goes on where the first one ended
    return clean, ((p.text, addition.noisy_answer(p, rng, **noise)) for p in problems)


def _chain_demonstrations(section: WarmStartSection, seed: int) -> tuple[Iterator[Pair], Iterator[Pair]]:
    problems, rng = chain.stream("warmstart", seed), random.Random(seed)
    clean = ((p.text, p.shortest) for p in problems)
    noise = {"drop_carry": section.drop_carry, "wrong_digit": section.wrong_digit}
    return clean, ((p.text, chain.noisy_response(p, rng, **noise)) for p in problems)


def _tally_demonstrations(section: WarmStartSection, seed: int) -> tuple[Iterator[Pair], Iterator[Pair]]:
    problems, rng = tally.stream("warmstart", seed), random.Random(seed)
    clean = ((p.text, p.response) for p in problems)
    return clean, ((p.text, tally.noisy_response(p, rng, wrong_digit=section.wrong_digit)) for p in problems)


LESSONS: Mapping[str, Lesson] = MappingProxyType(
    {
        addition.TASK: Lesson(
            characters="0123456789+=",
            max_length_tokens=64,
            shapes={
                "0.1m": Shape(
                    hidden=64,
                    layers=2,
                    heads=4,
                    intermediate=256,
                    # five times the usual: a model this small then learns to carry three times sooner
                    initializer_range=0.1,
                    clean_learning_rate=6e-3,
                    noisy_learning_rate=3e-3,
                )
            },
            batch_size=128,
            num_micro_batches=1,
            is_end_judged=True,
            validation=lambda: [(p.text, p.answer) for p in addition.all_problems("validation")],
            demonstrations=_addition_demonstrations,
        ),
        chain.TASK: Lesson(
            characters="0123456789+=",
            max_length_tokens=256,
            shapes={
                "0.3m": Shape(
                    hidden=96,
                    layers=3,
                    heads=4,
                    intermediate=256,
                    initializer_range=0.08,
                    clean_learning_rate=4e-3,
                    noisy_learning_rate=2e-3,
                ),
                "3m": Shape(
                    hidden=256,
                    layers=4,
                    heads=4,
                    intermediate=640,
                    initializer_range=0.05,
                    clean_learning_rate=2e-3,
                    noisy_learning_rate=1e-3,
                ),
            },
            batch_size=64,
            num_micro_batches=4,
            is_end_judged=False,
            validation=lambda: [(p.text, p.shortest) for p in chain.all_problems("validation")],
            demonstrations=_chain_demonstrations,
        ),
        tally.TASK: Lesson(
            characters=f"0123456789={tally.LABELS}",
            max_length_tokens=256,
            shapes={
                "3m": Shape(
                    hidden=256,
                    layers=4,
                    # with 4 it took longer to find the term of a label (one run each, at two rates)
                    heads=8,
                    intermediate=640,
                    initializer_range=0.05,
                    clean_learning_rate=2e-3,
                    noisy_learning_rate=1e-3,
                ),
            },
            batch_size=32,
            num_micro_batches=4,
            is_end_judged=True,
            validation=lambda: [(p.text, p.response) for p in tally.distinct("validation", 100, 0)],
            demonstrations=_tally_demonstrations,
        ),
    }
)
"""Task -> its lesson."""
