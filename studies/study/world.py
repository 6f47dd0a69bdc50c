"""The study's tasks as arrays: prompts, starting models, rewards, sampling, and accuracy on held-out prompts.

    addition  the quickstart's task and starting model; one right answer, so accuracy is exact
    chain     examples/worlds/chain in the smallest size, responses cut at 64 tokens: 13 to 64, the policy decides
              how many; any response whose last number is right counts, so accuracy is of sampled responses

Everything runs in one process. All prompts of a task have the same number of tokens, so sampling needs no padding.
"""

from __future__ import annotations

import fcntl
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from examples.worlds.chain import problems as chain
from tba.config import load_recipe
from tba_cli.generators import addition

ROOT = Path(__file__).resolve().parents[2]
EOS_ID = 2
FIRST_CHARACTER_ID = 4
CHARACTERS = "0123456789+="
NUM_TRAIN = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run is about."""

    name: str
    start: Any
    """How its starting model is made."""
    max_response_tokens: int
    num_steps: int
    """Optimizer steps of a run."""
    num_heldout: int
    is_exact: bool
    """Whether the answer and its end are the only right response."""
    problems: Callable[[str], list[Any]]
    """Of a split; each has `text` and `answer`."""


TASKS = MappingProxyType(
    {
        "addition": Task(
            name="addition",
            start=load_recipe(ROOT / "recipes/quickstart.toml").model.warm_start,
            max_response_tokens=5,
            num_steps=150,
            num_heldout=512,
            is_exact=True,
            problems=addition.all_problems,
        ),
        "chain": Task(
            name="chain",
            start="0.3m",
            max_response_tokens=64,
            num_steps=100,
            num_heldout=256,
            is_exact=False,
            problems=chain.all_problems,
        ),
    }
)


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character; the warm start's tokenizer gives the same (tests)."""
    return [FIRST_CHARACTER_ID + CHARACTERS.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """The text of token ids; special tokens are left out."""
    return "".join(CHARACTERS[token - FIRST_CHARACTER_ID] for token in tokens if token >= FIRST_CHARACTER_ID)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problems:
    """N problems as tokens."""

    task: Task
    ids: tuple[str, ...]
    prompts: Int[Tensor, "N P"]
    answers: tuple[str, ...]

    @classmethod
    @functools.cache
    def of(cls, task: str, split: str, count: int, order_seed: int) -> Problems:
        """The first `count` problems of a split in a seeded order."""
        problems = TASKS[task].problems(split)
        random.Random(f"study:{split}:{order_seed}").shuffle(problems)
        chosen = problems[:count]
        return cls(
            task=TASKS[task],
            ids=tuple(p.text for p in chosen),
            prompts=torch.tensor([encode(p.text) for p in chosen]),
            answers=tuple(p.answer for p in chosen),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def reward(self, row: int, tokens: list[int]) -> float:
        """1 for a right response to problem `row`, else 0."""
        if self.task.is_exact:
            return float(tokens == [*encode(self.answers[row]), EOS_ID])
        text = decode(tokens)
        digits = text[len(text.rstrip("0123456789")) :]
        return float(digits == self.answers[row])


def starting_model(folder: Path, task: str, seed: int) -> Path:
    """The folder of this seed's starting model, made now if it is not there (20 to 60 CPU seconds)."""
    path = folder / f"{task}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    # two workers may want the same one: the second waits until the first has made it, or has ended
    with (folder / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "config.json").is_file():
            _make(path, TASKS[task], seed)
    return path


def _make(path: Path, task: Task, seed: int) -> None:
    # both import torch's models
    if task.name == "addition":
        from tba_cli.starter_models.starting_model import make_starting_model

        make_starting_model(path, seed=seed, num_threads=1)
    else:
        from examples.worlds.chain.prepare import lesson
        from examples.worlds.starter import make

        torch.set_num_threads(1)
        make(lesson(task.start), path, seed=seed)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Pass@1 at temperature 1, the share of right greedy answers, and the mean length of the sampled ones.

    `addition`: both exact, without sampling noise. `chain`: one response to each held-out prompt, the same random
    numbers at every point."""

    sampled: float
    greedy: float
    num_tokens: float | None


class HeldOut:
    """Measures models on the same held-out problems in every run."""

    def __init__(self, task: str) -> None:
        self._problems = Problems.of(task, "heldout", TASKS[task].num_heldout, 0)
        rows = [[*encode(answer), EOS_ID] for answer in self._problems.answers]
        width = max(map(len, rows))
        self._answers = torch.tensor([[*row, *[-100] * (width - len(row))] for row in rows])  # [N, R]

    def accuracy(self, model: Any) -> Accuracy:
        """Measure one."""
        return self._exact(model) if self._problems.task.is_exact else self._sampled(model)

    @torch.no_grad()
    def _exact(self, model: Any) -> Accuracy:
        """One teacher-forced pass: greedy decoding is right exactly where every token of the answer is the most
        probable one after those before it."""
        width = self._answers.shape[1]
        inputs = torch.cat([self._problems.prompts, self._answers[:, :-1].clamp(min=0)], dim=1)
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=width).logits  # [N, R, V]
        losses = functional.cross_entropy(logits.transpose(1, 2), self._answers, ignore_index=-100, reduction="none")
        right = (logits.argmax(dim=2) == self._answers) | (self._answers < 0)
        sampled = float((-losses.sum(dim=1)).exp().mean())
        return Accuracy(sampled=sampled, greedy=float(right.all(dim=1).float().mean()), num_tokens=None)

    def _sampled(self, model: Any) -> Accuracy:
        problems, generator = self._problems, torch.Generator().manual_seed(0)
        limit = problems.task.max_response_tokens
        sampled = sample(model, problems.prompts, 1, limit, generator)
        greedy = sample(model, problems.prompts, 1, limit, None)
        shares = [
            float(np.mean([problems.reward(row, tokens.tolist()) for row, tokens in enumerate(found.tokens)]))
            for found in (sampled, greedy)
        ]
        return Accuracy(*shares, num_tokens=float(np.mean([len(tokens) for tokens in sampled.tokens])))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """B sampled completions, end of sequence included."""

    tokens: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]


@torch.no_grad()
def sample(
    model: Any, prompts: Int[Tensor, "N P"], num_each: int, max_tokens: int, generator: torch.Generator | None
) -> Samples:
    """`num_each` completions of every prompt at temperature 1, prompt after prompt, with the sampler's log-probs.

    Args:
        generator: None: greedy.
    """
    cache = model(input_ids=prompts[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(num_each)
    tokens = prompts[:, -1:].repeat_interleave(num_each, dim=0)  # [A, 1]
    num = len(tokens)
    ids, values = torch.full((num, max_tokens), EOS_ID), torch.zeros(num, max_tokens)
    lengths = torch.full((num,), max_tokens)
    alive = torch.arange(num)  # rows of the cache
    is_open = torch.ones(num, dtype=torch.bool)
    for place in range(max_tokens):
        logits: Float[Tensor, "A V"] = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        table = logits.log_softmax(dim=1)
        tokens = (
            table.argmax(1, keepdim=True)
            if generator is None
            else torch.multinomial(table.exp(), 1, generator=generator)
        )
        ids[alive, place], values[alive, place] = tokens[:, 0], table.gather(1, tokens)[:, 0]
        ended = is_open & (tokens[:, 0] == EOS_ID)
        lengths[alive[ended]] = place + 1
        is_open &= ~ended
        if not is_open.any():
            break
        # a few long responses must not cost as much as all of them
        if 2 * int(is_open.sum()) <= len(alive):
            cache.batch_select_indices(is_open.nonzero()[:, 0])
            alive, tokens, is_open = alive[is_open], tokens[is_open], is_open[is_open]
    rows = lengths.tolist()
    return Samples(
        tokens=[row[:end] for row, end in zip(ids.numpy().astype(np.int32), rows, strict=True)],
        logprobs=[row[:end] for row, end in zip(values.numpy(), rows, strict=True)],
    )
