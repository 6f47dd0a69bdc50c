"""Make a small starting model on this machine: a tiny Llama that solves its task three or four times in ten.

Supervised learning on the task's warm-start split has two phases. *Clean*: right answers, until the model mostly is
right on the validation split. *Noisy*: a fixed number of steps on answers that miswrite digits and, in sums, forget
carries. The noise sets the start accuracy, whatever the speed of the machine, so it is about the same for every seed.
Reinforcement learning then has to find out from rewards alone that it pays to write correctly; the demonstrations of
the second phase do not show that consistently.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tba.config.sections import WarmStartSection
from tba.errors import ConfigError
from tba_cli.starter_models.lessons import LESSONS, NUM_VALIDATION, Lesson, Pair, Shape

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CLEAN_WARMUP_STEPS = 30
CHECK_EVERY_STEPS = 10


def make_starting_model(path: str | Path, section: WarmStartSection, *, seed: int, num_threads: int) -> dict[str, Any]:
    """Build, train and save model and tokenizer to the folder `path`, complete or not at all.

    Args:
        seed: the run's seed, unless the section has its own.

    Returns:
        The report that is also saved as warmstart.json.

    Raises:
        ConfigError: the task has no warm start, or not in this size.
    """
    if (lesson := LESSONS.get(section.task)) is None:
        raise ConfigError(
            f"model.warm_start.task {section.task!r} has no warm start; the tasks with one are {', '.join(LESSONS)}"
        )
    shape = lesson.shape(section.size)
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    seed = seed if section.seed is None else section.seed
    tokenizer = build_tokenizer(lesson)
    torch.manual_seed(seed)
    model = build_model(tokenizer, lesson, shape)
    report: dict[str, Any] = {
        "settings": section.model_dump(mode="json"),
        "seed": seed,
        **train(model, tokenizer, section, lesson=lesson, shape=shape, seed=seed),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - begun_cpu_s,
    }
    target = Path(path)
    # a name with the pid: two runs may make the same model at once, and the last one to end wins
    half_made = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    (half_made / "warmstart.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    half_made.rename(target)
    return report


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


def build_model(tokenizer: PreTrainedTokenizerFast, lesson: Lesson, shape: Shape) -> LlamaForCausalLM:
    """Return an untrained model; seed torch before the call."""
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


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    section: WarmStartSection,
    *,
    lesson: Lesson,
    shape: Shape,
    seed: int,
) -> dict[str, Any]:
    """Train the model in both phases.

    Returns:
        Steps of the first phase, and the validation accuracy after each.
    """
    validation_pairs = lesson.validation()
    # a fixed seed: accuracies of different runs are about the same problems
    random.Random("validation").shuffle(validation_pairs)
    inputs, answers = _encode(validation_pairs[:NUM_VALIDATION], tokenizer)
    if not lesson.is_end_judged:
        answers = answers.masked_fill(answers.eq(_token_id(tokenizer, EOS)), -100)
    clean, noisy = lesson.demonstrations(section, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.clean_learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    accuracy, num_clean_steps = 0.0, 0
    while num_clean_steps < section.max_steps and accuracy < section.target_accuracy:
        num_clean_steps += 1
        rate = shape.clean_learning_rate * min(1.0, num_clean_steps / CLEAN_WARMUP_STEPS)
        _update(model, optimizer, _micro_batches(clean, lesson, tokenizer), rate)
        if num_clean_steps % CHECK_EVERY_STEPS == 0:
            accuracy = expected_accuracy(model, inputs, answers)
    for step in range(section.noise_steps):
        # falls to 0, so that the last batches do not decide where it ends
        rate = shape.noisy_learning_rate * (1 - step / section.noise_steps)
        _update(model, optimizer, _micro_batches(noisy, lesson, tokenizer), rate)
    return {
        "num_school_steps": num_clean_steps,
        "school_accuracy": accuracy,
        "validation_accuracy": expected_accuracy(model, inputs, answers),
    }


@torch.no_grad()
def expected_accuracy(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> float:
    """Return the mean probability of the right answers at temperature 1.

    With their eos that is the exact expected pass@1 where there is one right response, and else a lower bound.
    """
    return _answer_logprobs(model, inputs, answers).sum(dim=1).exp().mean().item()


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
    return [_encode(taken[first : first + size], tokenizer) for first in range(0, lesson.batch_size, size)]


def _encode(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
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


def _answer_logprobs(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> Tensor:
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
        (-_answer_logprobs(model, inputs, answers).sum() / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
