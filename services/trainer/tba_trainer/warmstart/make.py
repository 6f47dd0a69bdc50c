"""Makes the quickstart's starting model: a tiny Llama that adds two numbers right about three times in ten.

Two phases of supervised learning on the task's warm-start split. *School*: right answers, until the model mostly adds
right on the validation split. *Bad company*: a fixed number of steps on the answers of careless pupils, who forget
carries and miswrite digits. How careless they are sets the start accuracy, not how fast the machine is, so it is about
the same for every seed. Reinforcement learning then has to find out, from rewards alone, that carrying and writing
carefully pays; no demonstration of the second phase shows that consistently.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tba.config.sections import WarmStartSection
from tba.errors import ConfigError
from tba.tasks import addition
from tba_trainer.warmstart.tokenizer import BOS, EOS, PAD, build_tokenizer

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 64, 2, 4, 256
INITIALIZER_RANGE = 0.1  # five times the usual: a model this small then learns to carry three times sooner
SCHOOL_LEARNING_RATE, SCHOOL_WARMUP_STEPS = 6e-3, 30
CARELESS_LEARNING_RATE = 3e-3
BATCH_SIZE = 128
CHECK_EVERY_STEPS = 10
NUM_VALIDATION = 300


def make_starting_model(path: str | Path, section: WarmStartSection, *, seed: int, num_threads: int) -> dict[str, Any]:
    """Build, train and save model and tokenizer to the folder `path`, complete or not at all.

    Args:
        seed: the run's seed, unless the section has its own.

    Returns:
        The report that is also saved as warmstart.json.

    Raises:
        ConfigError: the task has no warm start.
    """
    if section.task != addition.TASK:
        raise ConfigError(f"model.warm_start.task {section.task!r} has no warm start; only {addition.TASK!r} has one")
    torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    seed = seed if section.seed is None else section.seed
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    report: dict[str, Any] = {
        "settings": section.model_dump(mode="json"),
        "seed": seed,
        **train(model, tokenizer, section, seed),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - begun_cpu_s,
    }
    target = Path(path)
    half_made = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    (half_made / "warmstart.json").write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    half_made.rename(target)
    return report


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model; seed torch before the call."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=64,
            initializer_range=INITIALIZER_RANGE,
            tie_word_embeddings=True,
            pad_token_id=_token_id(tokenizer, PAD),
            bos_token_id=_token_id(tokenizer, BOS),
            eos_token_id=_token_id(tokenizer, EOS),
        )
    )


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, section: WarmStartSection, seed: int
) -> dict[str, Any]:
    """Both phases.

    Returns:
        Steps of the first phase, and the validation accuracy after each.
    """
    validation_problems = addition.all_problems("validation")
    random.Random("validation").shuffle(validation_problems)
    validation_problems = validation_problems[:NUM_VALIDATION]
    validation = _encode([(p.text, p.answer) for p in validation_problems], tokenizer)
    problems, rng = addition.stream("warmstart", seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SCHOOL_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    school_accuracy, num_school_steps = 0.0, 0
    while num_school_steps < section.school_max_steps and school_accuracy < section.school_accuracy:
        num_school_steps += 1
        batch = _encode([(p.text, p.answer) for p in _take(problems, BATCH_SIZE)], tokenizer)
        _update(model, optimizer, batch, SCHOOL_LEARNING_RATE * min(1.0, num_school_steps / SCHOOL_WARMUP_STEPS))
        if num_school_steps % CHECK_EVERY_STEPS == 0:
            school_accuracy = expected_accuracy(model, *validation)
    for step in range(section.careless_steps):
        pairs = [
            (p.text, addition.careless_answer(p, rng, drop_carry=section.drop_carry, wrong_digit=section.wrong_digit))
            for p in _take(problems, BATCH_SIZE)
        ]
        rate = CARELESS_LEARNING_RATE * (1 - step / section.careless_steps)
        _update(model, optimizer, _encode(pairs, tokenizer), rate)
    return {
        "num_school_steps": num_school_steps,
        "school_accuracy": school_accuracy,
        "validation_accuracy": expected_accuracy(model, *validation),
    }


@torch.no_grad()
def expected_accuracy(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> float:
    """Exact expected pass@1 at temperature 1: the mean probability of the right answer with its end of sequence."""
    return _answer_logprobs(model, prompts, answers).sum(dim=1).exp().mean().item()


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _take(problems: Iterator[addition.Problem], count: int) -> list[addition.Problem]:
    return [next(problems) for _ in range(count)]


def _encode(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Prompt ids [B, P] (all of one length), and answer ids with eos [B, R], padded on the right with -100."""
    prompts = tokenizer([text for text, _ in pairs], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    longest = max(map(len, answers)) + 1
    rows = [[*ids, tokenizer.eos_token_id, *[-100] * (longest - 1 - len(ids))] for ids in answers]
    return torch.tensor(prompts), torch.tensor(rows)


def _answer_logprobs(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """Log-probs of the answer tokens [B, R], 0 where the row is padding."""
    inputs = torch.cat([prompts, answers[:, :-1].clamp(min=0)], dim=1)
    logits = model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
    return -functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=-100, reduction="none")


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], learning_rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss = -_answer_logprobs(model, *batch).sum() / (batch[1] >= 0).sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
