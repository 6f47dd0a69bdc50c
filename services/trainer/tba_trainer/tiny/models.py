"""Small random models of the families that the recipes use: policies, reward models, a victim, classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from tba_trainer.tiny.rows import lessons
from tba_trainer.tiny.tokenizers import FAMILIES, build_tokenizer

MAX_LENGTH_TOKENS = 256
INITIALIZER_RANGE = 0.1
"""Five times the usual: texts then get scores and next tokens that differ visibly."""
TEACHING_STEPS, TEACHING_BATCH, TEACHING_RATE = 60, 16, 5e-3
_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": MAX_LENGTH_TOKENS,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_LENGTH_TOKENS}
_ENCODER = {**_DECODER, "num_attention_heads": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model: its class, the family of its tokenizer, its sizes; a policy is taught a little."""

    model_class: str
    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_taught: bool = False


KINDS = {
    "llama": Kind("LlamaForCausalLM", "llama", {**_GROUPED, "tie_word_embeddings": False}, is_taught=True),
    "gpt_neox": Kind("GPTNeoXForCausalLM", "gpt_neox", _DECODER, is_taught=True),
    "gpt2": Kind("GPT2LMHeadModel", "gpt2", _GPT2, is_taught=True),
    "qwen2": Kind("Qwen2ForCausalLM", "qwen2", {**_GROUPED, "tie_word_embeddings": False}, is_taught=True),
    "llama_chat": Kind("LlamaForCausalLM", "llama_chat", {**_GROUPED, "tie_word_embeddings": False}),
    "gpt_neox_reward": Kind("GPTNeoXForSequenceClassification", "gpt_neox", {**_DECODER, "num_labels": 1}),
    "roberta_toxicity": Kind(
        "RobertaForSequenceClassification",
        "roberta",
        {
            **_ENCODER,
            "max_position_embeddings": MAX_LENGTH_TOKENS + 2,  # RoBERTa counts positions from 2
            "type_vocab_size": 1,
            "id2label": {0: "nothate", 1: "hate"},
            "label2id": {"nothate": 0, "hate": 1},
        },
    ),
    "bert_encoder": Kind("BertModel", "bert", _ENCODER),
}


def write_model(folder: Path, kind: Kind, *, seed: int) -> None:
    """Write model and tokenizer into `folder`, which is made.

    Args:
        seed: the weights are a function of it.
    """
    transformers.utils.logging.disable_progress_bar()
    tokenizer = build_tokenizer(FAMILIES[kind.family], max_length_tokens=MAX_LENGTH_TOKENS)
    model_class: Any = getattr(transformers, kind.model_class)
    config = AutoConfig.for_model(
        model_class.config_class.model_type,
        vocab_size=len(tokenizer),
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **kind.sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    if kind.is_taught:
        teach(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach(model: Any, tokenizer: Any) -> None:
    """A few supervised steps, so that a policy writes something like an answer and then ends: rewards then differ."""
    texts = lessons()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHING_RATE)
    for step in range(TEACHING_STEPS):
        chosen = [texts[(step * TEACHING_BATCH + i) % len(texts)] + tokenizer.eos_token for i in range(TEACHING_BATCH)]
        rows = tokenizer(chosen, padding=True, padding_side="right", return_tensors="pt")
        # by length and not by pad token: that may be the end of sequence, which has to be learned
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
