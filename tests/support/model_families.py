"""Tiny random models: of all families whose sequences the trainer can pack, and of some that it must pad."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 37
_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SHARED, "num_key_value_heads": 2}
PACKED = MappingProxyType(
    {
        "gpt2": {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "gpt_neox": _SHARED,
        "llama": _GROUPED,
        "mistral": {**_GROUPED, "sliding_window": None},
        "mistral with a window": {**_GROUPED, "sliding_window": 5},
        "qwen2": _GROUPED,
        "qwen2 with a window": {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "qwen3": {**_GROUPED, "head_dim": 8},
        "qwen3_moe": {
            **_GROUPED,
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    }
)
PADDED = MappingProxyType(
    {
        "olmo2": _GROUPED,
        "gemma2": {**_GROUPED, "head_dim": 8, "final_logit_softcapping": 0.5, "sliding_window": 5},
        "mixtral": {**_GROUPED, "num_local_experts": 4},
        "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
        "qwen2_moe": {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    }
)


def make_family_model(name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model in eval mode; the same name always gives the same weights."""
    config = AutoConfig.for_model(
        name.partition(" ")[0],
        **{**PACKED, **PADDED}[name],
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
