"""Make the quickstart's starting model on this machine: a tiny Llama that adds right three or four times in ten.

Supervised learning on the warm-start split of `addition` has two phases. *Clean*: right answers, until the model mostly
is right on the validation split. *Noisy*: a fixed number of steps on answers that miswrite digits and forget carries.
The noise sets the start accuracy, whatever the speed of the machine, so it is about the same for every seed.
Reinforcement learning then has to find out from rewards alone that it pays to write correctly; the demonstrations of
the second phase do not show that consistently.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
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
from tba_cli.generators import addition

Pair = tuple[str, str]
"""Prompt and response."""
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
MAX_LENGTH_TOKENS = 64
BATCH_SIZE = 128
MAX_CLEAN_STEPS = 800
CLEAN_WARMUP_STEPS = 30
CHECK_EVERY_STEPS = 10
NUM_VALIDATION = 300
DROP_CARRY, WRONG_DIGIT = 0.45, 0.13
"""Probabilities that a noisy answer forgets a carry, and that it has a random digit."""
CLEAN_LEARNING_RATE, NOISY_LEARNING_RATE = 6e-3, 3e-3
INITIALIZER_RANGE = 0.1
"""Five times the usual: a model this small then learns to carry three times sooner."""


def make_starting_model(path: str | Path, section: WarmStartSection, *, seed: int, num_threads: int) -> dict[str, Any]:
    """Build, train and save model and tokenizer to the folder `path`, complete or not at all.

    Args:
        seed: the run's seed.

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
        "settings": section.model_dump(mode="json"),
        "seed": seed,
        **train(model, tokenizer, section, seed=seed),
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; pad, bos, eos and unk are different tokens (ids 0 to 3)."""
    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, UNK, *addition.CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=MAX_LENGTH_TOKENS,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model; seed torch before the call."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_LENGTH_TOKENS,
            initializer_range=INITIALIZER_RANGE,
            tie_word_embeddings=True,
            pad_token_id=_token_id(tokenizer, PAD),
            bos_token_id=_token_id(tokenizer, BOS),
            eos_token_id=_token_id(tokenizer, EOS),
        )
    )


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, section: WarmStartSection, *, seed: int
) -> dict[str, Any]:
    """Train the model in both phases.

    Returns:
        Steps of the first phase, and the validation accuracy after each.
    """
    validation_pairs = [(p.text, p.answer) for p in addition.all_problems("validation")]
    # a fixed seed: accuracies of different runs are about the same problems
    random.Random("validation").shuffle(validation_pairs)
    inputs, answers = _encode(validation_pairs[:NUM_VALIDATION], tokenizer)
    problems, rng = addition.stream("warmstart", seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CLEAN_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    accuracy, num_clean_steps = 0.0, 0
    while num_clean_steps < MAX_CLEAN_STEPS and accuracy < section.target_accuracy:
        num_clean_steps += 1
        pairs = [(p.text, p.answer) for p in islice(problems, BATCH_SIZE)]
        rate = CLEAN_LEARNING_RATE * min(1.0, num_clean_steps / CLEAN_WARMUP_STEPS)
        _update(model, optimizer, *_encode(pairs, tokenizer), rate)
        if num_clean_steps % CHECK_EVERY_STEPS == 0:
            accuracy = expected_accuracy(model, inputs, answers)
    for step in range(section.noise_steps):
        noisy = [
            (p.text, addition.noisy_answer(p, rng, drop_carry=DROP_CARRY, wrong_digit=WRONG_DIGIT))
            for p in islice(problems, BATCH_SIZE)
        ]
        # falls to 0, so that the last batches do not decide where it ends
        rate = NOISY_LEARNING_RATE * (1 - step / section.noise_steps)
        _update(model, optimizer, *_encode(noisy, tokenizer), rate)
    return {
        "num_clean_steps": num_clean_steps,
        "clean_accuracy": accuracy,
        "validation_accuracy": expected_accuracy(model, inputs, answers),
    }


@torch.no_grad()
def expected_accuracy(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> float:
    """Return the mean probability of the right answers and their ends at temperature 1: the exact expected pass@1."""
    return _answer_logprobs(model, inputs, answers).sum(dim=1).exp().mean().item()


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def _encode(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return rows of prompt and answer [B, T], padded on the right, and what their last R tokens should be [B, R].

    All prompts have the same length. Padding is -100 there; an eos ends every answer and is no input.
    """
    rows = tokenizer([text + answer for text, answer in pairs], add_special_tokens=False)["input_ids"]
    longest, num_prompt_tokens = max(map(len, rows)), len(pairs[0][0])
    inputs = [[*row, *[tokenizer.pad_token_id] * (longest - len(row))] for row in rows]
    targets = [[*row[num_prompt_tokens:], tokenizer.eos_token_id, *[-100] * (longest - len(row))] for row in rows]
    return torch.tensor(inputs), torch.tensor(targets)


def _answer_logprobs(model: LlamaForCausalLM, inputs: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probs of the answer tokens [B, R], 0 where there is none."""
    logits = model(input_ids=inputs, logits_to_keep=answers.shape[1]).logits
    return -functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=-100, reduction="none")


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, inputs: Tensor, answers: Tensor, learning_rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    # per token, so that batches with long answers do not count for more
    (-_answer_logprobs(model, inputs, answers).sum() / (answers >= 0).sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
