"""The study's world: the addition task as arrays, its starting models, and exact accuracy on held-out sums.

Everything runs in one process. A prompt always has the same number of tokens (`47+85=`: six), so that sampling needs
no padding.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tba.config.sections import WarmStartSection
from tba_cli.generators import addition

EOS_ID = 2
FIRST_CHARACTER_ID = 4
CHARACTERS = "0123456789+="
NUM_PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS = 5
NUM_HELDOUT = 512
WARM_START = WarmStartSection(task=addition.TASK, target_accuracy=0.6, noise_steps=30)
"""About 0.34 sampled and 0.6 greedy at the start (docs/results.md says why not the quickstart's)."""


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character; the warm start's tokenizer gives the same (tests)."""
    return [FIRST_CHARACTER_ID + CHARACTERS.index(character) for character in text]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problems:
    """N sums as tokens."""

    ids: tuple[str, ...]
    prompts: Int[Tensor, "N 6"]
    answers: tuple[tuple[int, ...], ...]
    """Right answers with their end of sequence."""

    @classmethod
    @functools.cache
    def of(cls, split: str, count: int, order_seed: int) -> Problems:
        """The first `count` sums of a split in a seeded order."""
        problems = addition.all_problems(split)
        random.Random(f"study:{split}:{order_seed}").shuffle(problems)
        chosen = problems[:count]
        return cls(
            ids=tuple(f"{p.left}-{p.right}" for p in chosen),
            prompts=torch.tensor([encode(p.text) for p in chosen]),
            answers=tuple((*encode(p.answer), EOS_ID) for p in chosen),
        )

    def __len__(self) -> int:
        return len(self.ids)


def starting_model(folder: Path, seed: int) -> Path:
    """The folder of this seed's starting model, made now if it is not there (20 CPU seconds)."""
    path = folder / f"start-{seed}"
    if not (path / "config.json").is_file():
        from tba_cli.starter_models.addition_model import make_starting_model

        folder.mkdir(parents=True, exist_ok=True)
        make_starting_model(path, WARM_START, seed=seed, num_threads=1)
    return path


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Over the held-out sums: `sampled` is the exact expected pass@1 at temperature 1, `greedy` the share of right
    greedy answers. Neither has sampling noise."""

    sampled: float
    greedy: float


class HeldOut:
    """Measures a model on the same `NUM_HELDOUT` held-out sums in every run."""

    def __init__(self) -> None:
        problems = Problems.of("heldout", NUM_HELDOUT, 0)
        width = max(map(len, problems.answers))
        rows = [[*answer, *[-100] * (width - len(answer))] for answer in problems.answers]
        self._answers = torch.tensor(rows)  # [N, R]
        self._inputs = torch.cat([problems.prompts, self._answers[:, :-1].clamp(min=0)], dim=1)

    @torch.no_grad()
    def accuracy(self, model: Any) -> Accuracy:
        """One teacher-forced pass: greedy decoding is right exactly where every token of the answer is the most
        probable one after those before it."""
        width = self._answers.shape[1]
        logits = model(input_ids=self._inputs, use_cache=False, logits_to_keep=width).logits  # [N, R, V]
        losses = functional.cross_entropy(logits.transpose(1, 2), self._answers, ignore_index=-100, reduction="none")
        right = (logits.argmax(dim=2) == self._answers) | (self._answers < 0)
        return Accuracy(sampled=float((-losses.sum(dim=1)).exp().mean()), greedy=float(right.all(dim=1).float().mean()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """B sampled completions, end of sequence included."""

    tokens: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]


@torch.no_grad()
def sample(model: Any, prompts: Int[Tensor, "P 6"], num_each: int, generator: torch.Generator) -> Samples:
    """`num_each` completions of every prompt at temperature 1, prompt after prompt, with the sampler's log-probs."""
    cache = model(input_ids=prompts[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(num_each)
    tokens = prompts[:, -1:].repeat_interleave(num_each, dim=0)  # [B, 1]
    chosen, logprobs = [], []
    done = torch.zeros(len(tokens), dtype=torch.bool)
    for _ in range(MAX_RESPONSE_TOKENS):
        logits: Float[Tensor, "B V"] = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        table = logits.log_softmax(dim=1)
        tokens = torch.multinomial(table.exp(), 1, generator=generator)  # [B, 1]
        chosen.append(tokens[:, 0])
        logprobs.append(table.gather(1, tokens)[:, 0])
        done |= tokens[:, 0] == EOS_ID
        if done.all():
            break
    ids, values = torch.stack(chosen, 1).numpy().astype(np.int32), torch.stack(logprobs, 1).numpy()
    ends = np.where((ids == EOS_ID).any(1), (ids == EOS_ID).argmax(1) + 1, ids.shape[1])
    return Samples(
        tokens=[row[:end] for row, end in zip(ids, ends, strict=True)],
        logprobs=[row[:end] for row, end in zip(values, ends, strict=True)],
    )
