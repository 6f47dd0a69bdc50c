"""Make the starting model of a world: a small Llama with one token per character that mostly errs.

It learns in two phases. *Clean*: right answers, until the model is mostly right on the validation split. *Noisy*: a
fixed number of steps on answers with errors. The errors set the accuracy that training by rewards begins with.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tba_cli.starter_models.starting_model import (
    NUM_VALIDATION,
    MicroBatch,
    Pair,
    Shape,
    build_model,
    build_tokenizer,
    encode,
    save,
    teach,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The data, model shape and training settings of one starting model."""

    characters: str
    """The vocabulary: each character is one token."""
    max_length_tokens: int
    """Most tokens of a prompt and its response together that the model is made for."""
    shape: Shape
    batch_size: int
    num_micro_batches: int
    """Parts of a batch, each with responses of about the same length, so that there is little padding."""
    is_end_judged: bool
    """Whether validation also judges the end of the response; false if a right response may continue."""
    target_accuracy: float
    """The clean phase ends when the mean probability of the right answers of the validation split reaches this."""
    max_steps: int
    """The clean phase ends after this many steps in any case."""
    noise_steps: int
    validation: Callable[[], list[Pair]]
    """Returns the validation split with right answers; it is shuffled, and the first `NUM_VALIDATION` are used."""
    demonstrations: Callable[[int], tuple[Iterator[Pair], Iterator[Pair]]]
    """Returns an endless stream of clean pairs and one of noisy pairs, for a seed."""


def make(lesson: Lesson, folder: Path, *, seed: int) -> dict[str, Any]:
    """Build, train and save model and tokenizer to `folder`, complete or not at all.

    Returns:
        The report that is also saved as starter.json.
    """
    transformers_logging.disable_progress_bar()
    begun_s = time.monotonic()
    tokenizer: Any = build_tokenizer(lesson.characters, lesson.max_length_tokens)
    torch.manual_seed(seed)
    model = build_model(tokenizer, lesson.shape)
    validation_pairs = lesson.validation()
    # a fixed seed: accuracies of different runs are about the same problems
    random.Random("validation").shuffle(validation_pairs)
    inputs, answers = encode(validation_pairs[:NUM_VALIDATION], tokenizer)
    if not lesson.is_end_judged:
        answers = answers.masked_fill(answers.eq(tokenizer.eos_token_id), -100)
    taught = teach(
        model,
        lesson.shape,
        (inputs, answers),
        *(_batches(pairs, lesson, tokenizer) for pairs in lesson.demonstrations(seed)),
        target_accuracy=lesson.target_accuracy,
        max_clean_steps=lesson.max_steps,
        noise_steps=lesson.noise_steps,
    )
    report: dict[str, Any] = {
        "seed": seed,
        **taught,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": time.monotonic() - begun_s,
    }
    save(folder, model, tokenizer, {"starter.json": json.dumps(report, indent=1) + "\n"})
    return report


def prepare(world: str, lesson: Callable[[argparse.Namespace], Lesson], *, sizes: tuple[str, ...]) -> None:
    """Parse the command line and make the starting model of a world.

    Args:
        lesson: returns the lesson for the parsed arguments.
        sizes: the choices of --size; the first one is the default.
    """
    parser = argparse.ArgumentParser(description=f"Make the starting model of the world {world}.")
    parser.add_argument("--out", type=Path, default=Path(f"models/worlds/{world}"), help="the folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=sizes, default=sizes[0], help="about how many parameters")
    args = parser.parse_args()
    report = make(lesson(args), args.out, seed=args.seed)
    print(
        f"{args.out}: {report['num_parameters']} parameters, {report['wall_s']:.0f} s, "
        f"validation accuracy {report['validation_accuracy']:.2f}",
        file=sys.stderr,
    )


def _batches(pairs: Iterator[Pair], lesson: Lesson, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[MicroBatch]]:
    size = lesson.batch_size // lesson.num_micro_batches
    while True:
        taken = list(islice(pairs, lesson.batch_size))
        if lesson.num_micro_batches > 1:
            taken.sort(key=lambda pair: len(pair[1]))
        yield [encode(taken[first : first + size], tokenizer) for first in range(0, lesson.batch_size, size)]
