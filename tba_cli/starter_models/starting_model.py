"""Make the quickstart's starting model on this machine: a tiny Llama that adds right three or four times in ten.

Supervised learning on the warm-start split of `addition` has two phases. *Clean*: right answers, until the model mostly
is right on the validation split. *Noisy*: a fixed number of steps on answers that miswrite digits and forget carries.
The noise sets the start accuracy, whatever the speed of the machine, so it is about the same for every seed.
Reinforcement learning then has to find out from rewards alone that right answers pay. The demonstrations of the second
phase do not show that consistently.

Other small models with one token per character are made by the same parts (examples/worlds/starter.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tba_cli.generators import addition

Pair = tuple[str, str]
"""Prompt and response."""
MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets (`encode`)."""
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
MAX_LENGTH_TOKENS = 64
BATCH_SIZE = 128
MAX_CLEAN_STEPS = 800
CLEAN_WARMUP_STEPS = 30
TARGET_ACCURACY = 0.9
"""The clean phase ends when the mean probability of the right answers of the validation split reaches this."""
NOISE_STEPS = 80
"""Steps of the noisy phase; the errors in its answers set the accuracy at the start of training."""
CHECK_EVERY_STEPS = 10
NUM_VALIDATION = 300
DROP_CARRY, WRONG_DIGIT = 0.45, 0.13
"""Probabilities that a noisy answer forgets a carry, and that it has a random digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama with tied embeddings, and the learning rates at which it learns fastest."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    initializer_range: float
    clean_learning_rate: float
    noisy_learning_rate: float


SHAPE = Shape(
    hidden=64,
    layers=2,
    heads=4,
    intermediate=256,
    # five times the usual: a model this small then learns to carry three times sooner
    initializer_range=0.1,
    clean_learning_rate=6e-3,
    noisy_learning_rate=3e-3,
)


def make_starting_model(
    path: str | Path,
    *,
    seed: int,
    num_threads: int,
    target_accuracy: float = TARGET_ACCURACY,
    noise_steps: int = NOISE_STEPS,
) -> dict[str, Any]:
    """Build, train and save model and tokenizer to the folder `path`, complete or not at all.

    Returns:
        The report that is also saved as warmstart.json.
    """
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    report: dict[str, Any] = {
        "seed": seed,
        **train(model, tokenizer, seed=seed, target_accuracy=target_accuracy, noise_steps=noise_steps),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - begun_cpu_s,
    }
    save(Path(path), model, tokenizer, {"warmstart.json": json.dumps(report, indent=1) + "\n"})
    return report


def save(folder: Path, model: Any, tokenizer: Any, files: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write model, tokenizer and files (name -> text), complete or not at all."""
    # a name with the pid: two programs may make the same model at once, and the last one to end wins
    half_made = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    for name, text in files.items():
        (half_made / name).write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    half_made.rename(folder)


def build_tokenizer(
    characters: str = addition.CHARACTERS, max_length_tokens: int = MAX_LENGTH_TOKENS
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; pad, bos, eos and unk are different tokens (ids 0 to 3)."""
    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, UNK, *characters))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length_tokens,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, shape: Shape = SHAPE) -> LlamaForCausalLM:
    """Return an untrained model; seed torch before the call."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=tokenizer.model_max_length,
            initializer_range=shape.initializer_range,
            tie_word_embeddings=True,
            pad_token_id=_token_id(tokenizer, PAD),
            bos_token_id=_token_id(tokenizer, BOS),
            eos_token_id=_token_id(tokenizer, EOS),
        )
    )


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, target_accuracy: float, noise_steps: int
) -> dict[str, Any]:
    """Train the model in both phases.

    Returns:
        The steps of the clean phase, and the validation accuracy after each phase.
    """
    validation_pairs = [(p.text, p.answer) for p in addition.all_problems("validation")]
    # a fixed seed: accuracies of different runs are about the same problems
    random.Random("validation").shuffle(validation_pairs)
    problems, rng = addition.stream("warmstart", seed), random.Random(seed)
    clean = ((p.text, p.answer) for p in problems)
    noisy = ((p.text, addition.noisy_answer(p, rng, drop_carry=DROP_CARRY, wrong_digit=WRONG_DIGIT)) for p in problems)
    return teach(
        model,
        SHAPE,
        encode(validation_pairs[:NUM_VALIDATION], tokenizer),
        _batches(clean, tokenizer),
        _batches(noisy, tokenizer),
        target_accuracy=target_accuracy,
        max_clean_steps=MAX_CLEAN_STEPS,
        noise_steps=noise_steps,
    )


def _batches(pairs: Iterator[Pair], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[MicroBatch]]:
    while True:
        yield [encode(list(islice(pairs, BATCH_SIZE)), tokenizer)]


def teach(
    model: LlamaForCausalLM,
    shape: Shape,
    validation: MicroBatch,
    clean: Iterator[list[MicroBatch]],
    noisy: Iterator[list[MicroBatch]],
    *,
    target_accuracy: float,
    max_clean_steps: int,
    noise_steps: int,
) -> dict[str, Any]:
    """Train a model on clean batches until its validation accuracy reaches the target, then on noisy batches.

    Returns:
        The steps of the clean phase, and the validation accuracy after each phase.
    """
    rate = shape.clean_learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    accuracy, num_clean_steps = 0.0, 0
    while num_clean_steps < max_clean_steps and accuracy < target_accuracy:
        num_clean_steps += 1
        _update(model, optimizer, next(clean), rate * min(1.0, num_clean_steps / CLEAN_WARMUP_STEPS))
        if num_clean_steps % CHECK_EVERY_STEPS == 0:
            accuracy = expected_accuracy(model, *validation)
    for step in range(noise_steps):
        # falls to 0, so that the last batches do not decide where it ends
        _update(model, optimizer, next(noisy), shape.noisy_learning_rate * (1 - step / noise_steps))
    return {
        "num_clean_steps": num_clean_steps,
        "clean_accuracy": accuracy,
        "validation_accuracy": expected_accuracy(model, *validation),
    }


@torch.no_grad()
def expected_accuracy(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> float:
    """Return the mean probability of the right answers at temperature 1.

    The answers include their eos. So this is the exact expected pass@1 if there is one right response, else a lower
    bound.
    """
    return answer_logprobs(model, inputs, answers).sum(dim=1).exp().mean().item()


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def encode(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast) -> MicroBatch:
    """Return inputs [B, T] (prompt and answer, padded on the right), and the targets of the last R positions [B, R].

    The R positions begin at the last token of the shortest prompt. Targets in longer prompts and at padding are -100.
    An eos ends every answer in the targets, and is no input.
    """
    prompts, answers = (
        tokenizer(list(texts), add_special_tokens=False)["input_ids"] for texts in zip(*pairs, strict=True)
    )
    shortest = min(map(len, prompts))
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    inputs, targets = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        padding = longest - len(prompt) - len(answer)
        inputs.append([*prompt, *answer, *[tokenizer.pad_token_id] * padding])
        targets.append([*[-100] * (len(prompt) - shortest), *answer, tokenizer.eos_token_id, *[-100] * padding])
    return torch.tensor(inputs), torch.tensor(targets)


def answer_logprobs(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probs of the answer tokens [B, R], 0 where the target is -100."""
    logits = model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
    return -functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=-100, reduction="none")


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batches: list[MicroBatch], learning_rate: float
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
