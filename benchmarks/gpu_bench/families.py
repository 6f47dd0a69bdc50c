"""Log-probs of packed families on the device, per dtype, against float64 on the CPU: the trainer's side of canaries."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.policy import TORCH_DTYPES, frozen_copy
from transformers import AutoConfig

from benchmarks.gpu_bench.check import Bench, Findings
from benchmarks.gpu_bench.models import random_model

LIMITS = MappingProxyType({"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25})
"""In nats, of random models, which round more than trained ones; float32: order of sums, in logits of size 10."""
_LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
FAMILIES = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": {**_LLAMA, "tie_word_embeddings": True},
        "qwen3": {**_LLAMA, "head_dim": 64},
        "gpt_neox": {"num_attention_heads": 8, "num_hidden_layers": 4},
        "gpt2": {"n_head": 8, "n_layer": 4},
    }
)


def family_config(family: str, *, quick: bool) -> Any:
    """Return the config of a small model whose logits have a standard deviation of about 2, as trained ones have."""
    hidden, vocab_size = (64, 256) if quick else (512, 32_000)
    width = (
        {"n_embd": hidden, "n_positions": 1024}
        if family == "gpt2"
        else {"hidden_size": hidden, "intermediate_size": 4 * hidden, "max_position_embeddings": 1024}
    )
    return AutoConfig.for_model(
        family,
        **{**FAMILIES[family], **width},
        vocab_size=vocab_size,
        initializer_range=2 / hidden**0.5,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def check_families(bench: Bench, found: Findings) -> None:
    """Compare the log-probs that canaries are made of, in the published dtypes and under autocast.

    The limit is for the largest gap of a few tokens. Here are many, so the mean has half of it.
    """
    rng = np.random.default_rng(0)
    most = 40 if bench.quick else 256
    families = ("qwen2", "gpt2") if bench.quick else tuple(FAMILIES)
    for family in families:
        config = family_config(family, quick=bench.quick)
        prompts, responses = (
            [rng.integers(2, config.vocab_size, int(rng.integers(1, most))).astype(np.int32) for _ in range(4)]
            for _ in range(2)
        )
        model = random_model(config, "cpu")
        exact = LogprobModel(copy.deepcopy(model).double(), temperature=1.0)
        with torch.no_grad():
            expected = exact.token_logprobs(pack_sequences(prompts, responses, "cpu"))
        model.to(bench.device)
        for name, dtype in TORCH_DTYPES.items():
            limit = LIMITS[name]
            cases: dict[str, tuple[Any, torch.dtype | None]] = {name: (frozen_copy(model, dtype), None)}
            if name == "bfloat16":
                cases["autocast"] = (copy.deepcopy(model), dtype)
            for case, (made, autocast) in cases.items():
                with found.part(f"{family}_{case}"), torch.no_grad():
                    policy = LogprobModel(made, temperature=1.0, autocast_dtype=autocast)
                    values = policy.token_logprobs(pack_sequences(prompts, responses, bench.device)).cpu()
                    gaps = (values.double() - expected).abs()
                    found.at_most(f"{family}_{case}_mean_gap_nats", float(gaps.mean()), limit / 2)
                    found.note(f"{family}_{case}_max_gap_nats", float(gaps.max()))
