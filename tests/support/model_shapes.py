"""The shapes of the models that the shipped recipes name, as the hub gives them."""

from __future__ import annotations

from typing import Any

from tba_cli.sizing.model_shape import ModelShape, shape_of_config


def _shape(num_params: int, model_type: str, **config: Any) -> ModelShape:
    shape = shape_of_config({"model_type": model_type, **config}, num_params=num_params)
    assert shape is not None
    return shape


def _llama(num_params: int, hidden: int, layers: int, heads: tuple[int, int], inner: int, vocab: int, **config: Any):
    return _shape(
        num_params,
        **{"model_type": "llama", "tie_word_embeddings": False, **config},
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        intermediate_size=inner,
        vocab_size=vocab,
    )


def _neox(num_params: int, hidden: int, layers: int, heads: int, vocab: int = 50_304) -> ModelShape:
    return _shape(
        num_params,
        "gpt_neox",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        vocab_size=vocab,
        tie_word_embeddings=False,
    )


_ROBERTA = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50_265}
_GPT2 = _shape(124_439_808, "gpt2", n_embd=768, n_layer=12, n_head=12, n_positions=1024, vocab_size=50_257)
_LLAMA_8B = _llama(8_030_261_248, 4096, 32, (32, 8), 14_336, 128_256)
_PYTHIA_410M, _PYTHIA_1B = _neox(405_334_016, 1024, 24, 16), _neox(1_011_781_632, 2048, 16, 8)
_PYTHIA_2_8B = _neox(2_775_208_960, 2560, 32, 32)
QWEN_7B = _llama(7_615_616_512, 3584, 28, (28, 4), 18_944, 152_064, model_type="qwen2")
SHAPES = {
    "models/rho-1b-sft-gsm8k": _llama(1_100_048_384, 2048, 22, (32, 4), 5632, 32_000),
    "models/Qwen2.5-7B": QWEN_7B,
    "models/pythia410m-sft-tldr": _PYTHIA_410M,
    "models/pythia410m-rm-tldr6.9b": _PYTHIA_410M,
    "models/pythia1b-sft-tldr": _PYTHIA_1B,
    "models/pythia1b-rm-tldr6.9b": _PYTHIA_1B,
    "models/pythia2.8b-sft-tldr": _PYTHIA_2_8B,
    "models/pythia2.8b-rm-tldr6.9b": _PYTHIA_2_8B,
    "models/pythia6.9b-gold-tldr": _neox(6_857_302_016, 4096, 32, 32, vocab=50_432),
    "models/gpt2-sft-redteam": _GPT2,
    "models/gpt2-alpaca": _GPT2,
    "models/roberta-hate-speech": _shape(124_647_170, "roberta", **_ROBERTA),
    "models/Llama-3.2-1B-sft-redteam": _llama(
        1_235_814_400, 2048, 16, (32, 8), 8192, 128_256, tie_word_embeddings=True, head_dim=64
    ),
    "models/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "models/Llama-Guard-3-8B": _LLAMA_8B,
}
"""Folder in the recipe -> the model's shape."""
