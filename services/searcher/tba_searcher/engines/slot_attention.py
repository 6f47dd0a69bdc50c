"""Attention of one new token per row over its slot, for models with grouped heads on CPU: two batched products and a
softmax.

For torch's kernel, transformers copies the keys and values of a group once per query head. Here the query heads of a
group are the rows of one product, and nothing is copied. Heads without groups stay with torch's kernel: as fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tba_slots"
_PLAIN_KEYWORDS = frozenset({"position_ids", "use_cache", "cache_position", "is_causal", "sliding_window"})
"""Keywords of a model's call that change nothing where a mask is given."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers asks an attention function: query [N, H, Q, D], keys and values [N, G, L, D] -> [N, Q, H, D].

    Whatever is not plain decoding (Q = 1, G < H, an additive mask [N, 1, 1, L]) goes to transformers' own function.
    """
    unusual = any(kwargs[name] is not None for name in kwargs.keys() - _PLAIN_KEYWORDS)
    is_grouped = query.shape[1] > key.shape[1]
    if query.shape[2] != 1 or not is_grouped or attention_mask is None or attention_mask.dtype == torch.bool or unusual:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    num_rows, num_heads, _, head_dim = query.shape
    num_groups, length = key.shape[1], key.shape[2]
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(num_rows * num_groups, num_heads // num_groups, head_dim)  # [N * G, H / G, D]
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2)).view(num_rows, num_heads, 1, length)
    probs = torch.softmax(scores + attention_mask, dim=-1)
    mixed = torch.bmm(probs.view(num_rows * num_groups, -1, length), value.flatten(0, 1))  # [N * G, H / G, D]
    return mixed.view(num_rows, 1, num_heads, head_dim), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_slot_attention(model: Any) -> None:
    """Let a model on CPU attend this way, if its code takes attention functions."""
    if getattr(model, "_supports_attention_backend", False) and model.device.type == "cpu":
        model.set_attn_implementation(NAME)
