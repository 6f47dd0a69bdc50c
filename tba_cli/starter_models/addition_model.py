"""Make the quickstart's starting model: a tiny Llama that adds two numbers correctly about three times in ten.

Supervised learning on the task's warm-start split has two phases. *Clean*: correct answers, until the model mostly adds
correctly on the validation split. *Noisy*: a fixed number of steps on answers that forget carries and miswrite digits.
The noise sets the start accuracy, whatever the speed of the machine, so it is about the same for every seed.
Reinforcement learning then has to find out from rewards alone that it pays to carry and to write correctly; the
demonstrations of the second phase do not show that consistently.
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tba.config.sections import WarmStartSection
from tba.errors import ConfigError
from tba_cli.generators import addition

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 64, 2, 4, 256
INITIALIZER_RANGE = 0.1  # five times the usual: a model this small then learns to carry three times sooner
CLEAN_LEARNING_RATE, CLEAN_WARMUP_STEPS = 6e-3, 30
NOISY_LEARNING_RATE = 3e-3
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
    # a name with the pid: two runs may make the same model at once, and the last one to end wins
    half_made = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    (half_made / "warmstart.json").write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    half_made.rename(target)
    return report


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; pad, bos, eos and unk are different tokens (ids 0 to 3)."""
    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, UNK, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, model_max_length=64
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model; seed torch before the call."""
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
    """Train the model in both phases.

    Returns:
        Steps of the first phase, and the validation accuracy after each.
    """
    validation_problems = addition.all_problems("validation")
    # a fixed seed: accuracies of different runs are about the same problems
    random.Random("validation").shuffle(validation_problems)
    validation_problems = validation_problems[:NUM_VALIDATION]
    validation = _encode([(p.text, p.answer) for p in validation_problems], tokenizer)
    problems, rng = addition.stream("warmstart", seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CLEAN_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    accuracy, num_clean_steps = 0.0, 0
    while num_clean_steps < section.max_steps and accuracy < section.target_accuracy:
        num_clean_steps += 1
        batch = _encode([(p.text, p.answer) for p in _take(problems, BATCH_SIZE)], tokenizer)
        _update(model, optimizer, batch, CLEAN_LEARNING_RATE * min(1.0, num_clean_steps / CLEAN_WARMUP_STEPS))
        if num_clean_steps % CHECK_EVERY_STEPS == 0:
            accuracy = expected_accuracy(model, *validation)
    for step in range(section.noise_steps):
        pairs = [
            (p.text, addition.noisy_answer(p, rng, drop_carry=section.drop_carry, wrong_digit=section.wrong_digit))
            for p in _take(problems, BATCH_SIZE)
        ]
        # falls to 0, so that the last batches do not decide where it ends
        rate = NOISY_LEARNING_RATE * (1 - step / section.noise_steps)
        _update(model, optimizer, _encode(pairs, tokenizer), rate)
    return {
        # names of the stored report, which older releases have written
        "num_school_steps": num_clean_steps,
        "school_accuracy": accuracy,
        "validation_accuracy": expected_accuracy(model, *validation),
    }


@torch.no_grad()
def expected_accuracy(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> float:
    """Return the exact expected pass@1 at temperature 1: the mean probability of the right answer and its eos."""
    return _answer_logprobs(model, prompts, answers).sum(dim=1).exp().mean().item()


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _take(problems: Iterator[addition.Problem], count: int) -> list[addition.Problem]:
    return [next(problems) for _ in range(count)]


def _encode(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return prompt ids [B, P] (all of one length), and answer ids with eos [B, R], padded on the right with -100."""
    prompts = tokenizer([text for text, _ in pairs], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    # +1: the end of sequence
    longest = max(map(len, answers)) + 1
    rows = [[*ids, tokenizer.eos_token_id, *[-100] * (longest - 1 - len(ids))] for ids in answers]
    return torch.tensor(prompts), torch.tensor(rows)


def _answer_logprobs(model: LlamaForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probs of the answer tokens [B, R], 0 where the row is padding."""
    inputs = torch.cat([prompts, answers[:, :-1].clamp(min=0)], dim=1)
    logits = model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
    return -functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=-100, reduction="none")


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], learning_rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # per token, so that batches with long answers do not count for more
    loss = -_answer_logprobs(model, *batch).sum() / (batch[1] >= 0).sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
