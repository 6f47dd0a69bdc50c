"""Make the starting model of a world: a small Llama with one token per character that mostly errs.

It learns twice. *Clean*: right answers, until the model mostly is right on the validation split. *Noisy*: a fixed
number of steps on answers with errors. The errors set the accuracy that training by rewards begins with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

Pair = tuple[str, str]
"""Prompt and response."""
NUM_VALIDATION = 300
"""Most problems of a validation."""
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CLEAN_WARMUP_STEPS = 30
CHECK_EVERY_STEPS = 10


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
    """What one starting model learns from, and how."""

    characters: str
    """One token each."""
    max_length_tokens: int
    """Of prompt and response, the longest that the model is made for."""
    shape: Shape
    batch_size: int
    num_micro_batches: int
    """Of about the same lengths each: responses of very different lengths would be padding for the most part."""
    is_end_judged: bool
    """Whether validation asks for the end of the response too. Not where a right response may go on."""
    target_accuracy: float
    """The clean phase ends when the mean probability of the right answers of the validation split reaches this."""
    max_steps: int
    """The clean phase ends after this many steps in any case."""
    noise_steps: int
    validation: Callable[[], list[Pair]]
    """Right answers of the validation split. They are shuffled, and the first `NUM_VALIDATION` count."""
    demonstrations: Callable[[int], tuple[Iterator[Pair], Iterator[Pair]]]
    """Clean and noisy pairs without end, for a seed."""


def make(lesson: Lesson, folder: Path, *, seed: int) -> dict[str, Any]:
    """Build, train and save model and tokenizer to `folder`, complete or not at all.

    Returns:
        The report that is also saved as starter.json.
    """
    transformers_logging.disable_progress_bar()
    begun_s = time.monotonic()
    tokenizer = build_tokenizer(lesson)
    torch.manual_seed(seed)
    model = build_model(tokenizer, lesson)
    report: dict[str, Any] = {
        "seed": seed,
        **train(model, tokenizer, lesson, seed=seed),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": time.monotonic() - begun_s,
    }
    # a name with the pid: two programs may make the same model at once, and the last one to end wins
    half_made = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    (half_made / "starter.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    half_made.rename(folder)
    return report


def prepare(world: str, lesson: Callable[[argparse.Namespace], Lesson], *, sizes: tuple[str, ...]) -> None:
    """Run the program of a world that makes its starting model.

    Args:
        lesson: of the chosen size.
        sizes: that the world has; the first one is the default.
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


def build_tokenizer(lesson: Lesson) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; pad, bos, eos and unk are different tokens (ids 0 to 3)."""
    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, UNK, *lesson.characters))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=lesson.max_length_tokens,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, lesson: Lesson) -> LlamaForCausalLM:
    """Return an untrained model; seed torch before the call."""
    shape = lesson.shape
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=lesson.max_length_tokens,
            initializer_range=shape.initializer_range,
            tie_word_embeddings=True,
            pad_token_id=_token_id(tokenizer, PAD),
            bos_token_id=_token_id(tokenizer, BOS),
            eos_token_id=_token_id(tokenizer, EOS),
        )
    )


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lesson: Lesson, *, seed: int) -> dict[str, Any]:
    """Train the model in both phases.

    Returns:
        Steps of the first phase, and the validation accuracy after each.
    """
    shape = lesson.shape
    validation_pairs = lesson.validation()
    # a fixed seed: accuracies of different runs are about the same problems
    random.Random("validation").shuffle(validation_pairs)
    inputs, answers = encode(validation_pairs[:NUM_VALIDATION], tokenizer)
    if not lesson.is_end_judged:
        answers = answers.masked_fill(answers.eq(_token_id(tokenizer, EOS)), -100)
    clean, noisy = lesson.demonstrations(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.clean_learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    accuracy, num_clean_steps = 0.0, 0
    while num_clean_steps < lesson.max_steps and accuracy < lesson.target_accuracy:
        num_clean_steps += 1
        rate = shape.clean_learning_rate * min(1.0, num_clean_steps / CLEAN_WARMUP_STEPS)
        _update(model, optimizer, _micro_batches(clean, lesson, tokenizer), rate)
        if num_clean_steps % CHECK_EVERY_STEPS == 0:
            accuracy = expected_accuracy(model, inputs, answers)
    for step in range(lesson.noise_steps):
        # falls to 0, so that the last batches do not decide where it ends
        rate = shape.noisy_learning_rate * (1 - step / lesson.noise_steps)
        _update(model, optimizer, _micro_batches(noisy, lesson, tokenizer), rate)
    return {
        "num_clean_steps": num_clean_steps,
        "clean_accuracy": accuracy,
        "validation_accuracy": expected_accuracy(model, inputs, answers),
    }


@torch.no_grad()
def expected_accuracy(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> float:
    """Return the mean probability of the right answers at temperature 1.

    With their eos that is the exact expected pass@1 where there is one right response, and else a lower bound.
    """
    return answer_logprobs(model, inputs, answers).sum(dim=1).exp().mean().item()


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _micro_batches(
    pairs: Iterator[Pair], lesson: Lesson, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[Tensor, Tensor]]:
    taken = list(islice(pairs, lesson.batch_size))
    if lesson.num_micro_batches > 1:
        taken.sort(key=lambda pair: len(pair[1]))
    size = lesson.batch_size // lesson.num_micro_batches
    return [encode(taken[first : first + size], tokenizer) for first in range(0, lesson.batch_size, size)]


def encode(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return rows of prompt and answer [B, T], padded on the right, and what their last R tokens should be [B, R].

    R counts from the end of the shortest prompt. Tokens of longer prompts and padding are -100 there; an eos ends every
    answer and is no input.
    """
    prompts = tokenizer([text for text, _ in pairs], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    shortest, longest = min(map(len, prompts)), max(lengths)
    inputs, targets = [], []
    for prompt, answer, length in zip(prompts, answers, lengths, strict=True):
        inputs.append([*prompt, *answer, *[tokenizer.pad_token_id] * (longest - length)])
        skipped, padding = [-100] * (len(prompt) - shortest), [-100] * (longest - length)
        targets.append([*skipped, *answer, tokenizer.eos_token_id, *padding])
    return torch.tensor(inputs), torch.tensor(targets)


def answer_logprobs(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probs of the answer tokens [B, R], 0 where there is none."""
    logits = model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
    return -functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=-100, reduction="none")


def _update(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    learning_rate: float,
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    num_tokens = sum((answers >= 0).sum() for _, answers in batches)
    for inputs, answers in batches:
        # per token, so that batches with long answers do not count for more
        (-answer_logprobs(model, inputs, answers).sum() / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
