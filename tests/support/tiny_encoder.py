"""A tiny random encoder with a character tokenizer, in Hugging Face format, for `eval.embedding_model`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from tests.support.tiny_model import make_tiny_tokenizer

MAX_TOKENS = 32


def make_tiny_encoder(folder: Path) -> Path:
    """Write model and tokenizer into `folder`; return the folder."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_TOKENS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder
