"""Make models from random weights for the worlds whose data is made by rule, by supervised training on three losses:

    answers   -sum_t log pi(y_t | x, y_<t) / T,   T response tokens of the step, the end of sequence included
    pairs     -log sigmoid(s(chosen) - s(rejected)) + CENTRE (s(chosen) + s(rejected))^2, the mean over pairs
    labels    -log softmax(z(text))[label], the mean over texts

Plain loops for models of a million parameters. A model of a real size is fine-tuned by TRL (docs/recipes.md).
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from tba_cli.starter_models.starting_model import Pair, answer_logprobs, encode

EOS, PAD = "<|endoftext|>", "<|padding|>"
CENTRE = 0.01
"""Weight of the second term of pairs: it keeps the mean score near 0; differences alone do not (arXiv 2312.09244)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The architecture of a new model."""

    family: str
    """`llama`, `qwen2`, `gpt2` or `gpt_neox`."""
    hidden: int
    layers: int
    heads: int
    inner: int
    """Width of the feed-forward layers."""
    max_length_tokens: int
    vocab_size: int
    initializer_range: float
    special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Number of steps, batch size and learning rate schedule of one training."""

    num_steps: int
    batch_size: int
    rate: float
    """Reached after `warmup_steps`, and kept until `decay_steps` before the end."""
    final: float = 0.0
    warmup_steps: int = 0
    decay_steps: int | None = None
    """The rate falls from `rate` to `final` over so many last steps; None: from the end of the warm-up on."""
    is_cosine: bool = False
    """Whether the rate falls along half a cosine; else along a line."""
    schedule_steps: int | None = None
    """The last step of the schedule, if training ends before it; None: `num_steps`."""

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step (0 is the first)."""
        if step < self.warmup_steps:
            return self.rate * (step + 1) / self.warmup_steps
        end = self.schedule_steps or self.num_steps
        length = end - self.warmup_steps if self.decay_steps is None else self.decay_steps
        done = min(1.0, max(0.0, (step - (end - length)) / length))
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.is_cosine else 1 - done
        return self.final + (self.rate - self.final) * left


def new_tokenizer(sizes: Sizes, texts: Iterable[str], *, pieces: str | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; it can write any text, and no token joins two digits.

    Args:
        pieces: a regular expression of the pieces that no token crosses; None: those of GPT-2.
    """
    core = Tokenizer(models.BPE())
    digits, split = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(Regex(pieces or ""), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [split if pieces else digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces is None)]
    )
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocab_size,
        special_tokens=[EOS, PAD, *sizes.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=sizes.max_length_tokens,
        clean_up_tokenization_spaces=False,
    )


def new_model(sizes: Sizes, tokenizer: Any, *, seed: int = 0, labels: Sequence[str] = ()) -> Any:
    """Return a model with random weights: a language model, or a text classifier if `labels` are given."""
    if sizes.family == "gpt2":
        names: dict[str, Any] = {
            "n_embd": sizes.hidden,
            "n_inner": sizes.inner,
            "n_layer": sizes.layers,
            "n_head": sizes.heads,
            "n_positions": sizes.max_length_tokens,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        }
    else:
        names = {
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.inner,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "max_position_embeddings": sizes.max_length_tokens,
        }
    if sizes.family in ("llama", "qwen2"):
        names["num_key_value_heads"] = sizes.heads
    if labels:
        numbers = dict(enumerate(labels))
        names |= {"id2label": numbers, "label2id": {name: number for number, name in numbers.items()}}
    config = AutoConfig.for_model(
        sizes.family,
        vocab_size=len(tokenizer),
        initializer_range=sizes.initializer_range,
        tie_word_embeddings=sizes.family != "gpt_neox",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **names,
    )
    torch.manual_seed(seed)
    kind: Any = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    return kind.from_config(config).train()


def learn_answers(model: Any, tokenizer: Any, pairs: Sequence[Pair], steps: Steps, *, seed: int = 0) -> None:
    """Train a model on the responses of pairs (prompt, response); end of sequence is appended to each."""

    def loss(batch: list[Pair]) -> Tensor:
        inputs, answers = encode(batch, tokenizer)
        return -answer_logprobs(model, inputs, answers).sum() / (answers >= 0).sum()

    learn(model, pairs, steps, loss, seed=seed)


def learn_pairs(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], steps: Steps, *, seed: int = 0) -> None:
    """Train a model to give `chosen` of (chosen, rejected) the higher score; end of sequence is appended to both."""

    def loss(batch: list[tuple[str, str]]) -> Tensor:
        scores = _logits(model, tokenizer, [text + EOS for pair in batch for text in pair]).view(-1, 2)
        chosen, rejected = scores[:, 0], scores[:, 1]
        return (CENTRE * (chosen + rejected).square() - functional.logsigmoid(chosen - rejected)).mean()

    learn(model, pairs, steps, loss, seed=seed)


def learn_labels(model: Any, tokenizer: Any, texts: Sequence[tuple[str, str]], steps: Steps, *, seed: int = 0) -> None:
    """Train a classifier on pairs (text, label)."""

    def loss(batch: list[tuple[str, str]]) -> Tensor:
        labels = torch.tensor([model.config.label2id[label] for _, label in batch])
        return functional.cross_entropy(_logits(model, tokenizer, [text for text, _ in batch]), labels)

    learn(model, texts, steps, loss, seed=seed)


def classifier_of(base: Path) -> Any:
    """Load a language model's body with a new output head that gives one score."""
    torch.manual_seed(0)
    kind: Any = AutoModelForSequenceClassification
    return kind.from_pretrained(base, num_labels=1).train()


def prepare(makers: dict[Path, Callable[[Path], None]]) -> None:
    """Make each folder that does not exist with its function, in order."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for folder, make in makers.items():
        if folder.is_dir():
            print(f"{folder}: here already", file=sys.stderr)
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun_s = time.monotonic()
        make(folder)
        print(f"{folder}: made in {time.monotonic() - begun_s:.0f} s", file=sys.stderr)


def learn(
    model: Any, examples: Sequence[Any], steps: Steps, loss_of: Callable[[list[Any]], Tensor], *, seed: int
) -> None:
    """Train a model on the loss of batches of examples, each of which comes once per pass over all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=steps.rate, betas=(0.9, 0.99), weight_decay=0.0)
    rng, order = random.Random(seed), []
    for step in range(steps.num_steps):
        while len(order) < steps.batch_size:
            order = [*order, *rng.sample(range(len(examples)), len(examples))]
        batch, order = [examples[i] for i in order[: steps.batch_size]], order[steps.batch_size :]
        for group in optimizer.param_groups:
            group["lr"] = steps.rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _logits(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return a classifier's outputs [B, labels] at the last token of each text that is not padding."""
    rows = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
