"""Tiny models with random weights, in Hugging Face format: a reward model, a victim, a classifier, a guard.

All have the same tokens: one per byte, and the special tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

BOS, PAD, EOS = "<s>", "<pad>", "</s>"
CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<s>assistant: {% endif %}"
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def byte_tokenizer(
    *, pad: str | None = PAD, wrap: bool = False, chat: str | None = None, max_tokens: int = 512
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte; `wrap` puts BOS and EOS around each text, as for Roberta."""
    names = [BOS, PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if wrap:
        tokenizer.post_processor = processors.RobertaProcessing((EOS, 2), (BOS, 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=pad,
        chat_template=chat,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def save_reward_model(folder: Path, *, pad_is_eos: bool = False, seed: int = 0) -> Path:
    """Save a GPT-NeoX with one score per sequence, read at its last token; return the folder."""
    tokenizer = byte_tokenizer(pad=None)
    config = GPTNeoXConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        id2label={0: "LABEL_0"},
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2 if pad_is_eos else None,
    )
    return _save(folder, GPTNeoXForSequenceClassification, config, tokenizer, seed)


def save_classifier(folder: Path, *, seed: int = 0) -> Path:
    """Save a Roberta classifier with the labels `nothate` and `hate`; return the folder."""
    tokenizer = byte_tokenizer(wrap=True, max_tokens=62)
    config = RobertaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        id2label={0: "nothate", 1: "hate"},
        label2id={"nothate": 0, "hate": 1},
        initializer_range=0.5,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    return _save(folder, RobertaForSequenceClassification, config, tokenizer, seed)


def save_victim(folder: Path, *, seed: int = 0) -> Path:
    """Save a GPT-2 without a chat template; return the folder."""
    tokenizer = byte_tokenizer(pad=None)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=1,  # vLLM's kernels for the CPU know no smaller head than 32
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    return _save(folder, GPT2LMHeadModel, config, tokenizer, seed)


def save_chat_model(folder: Path, *, seed: int = 0, chat: str = CHAT) -> Path:
    """Save a Llama with a chat template, as a guard or as a victim that chats; return the folder."""
    tokenizer = byte_tokenizer(pad=None, chat=chat)
    config = LlamaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    return _save(folder, LlamaForCausalLM, config, tokenizer, seed)


def _save(
    folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
