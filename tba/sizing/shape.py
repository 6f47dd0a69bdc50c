"""The sizes of a decoder that decide how much memory it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.errors import ConfigError

MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer."""

    num_params: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


def llama_shape(config: Mapping[str, int], *, tied: bool, qkv_bias: bool = False) -> ModelShape:
    """Of a model of the Llama family (Llama, Mistral, Qwen2), its parameters counted from its config."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    attention = hidden * head * (2 * heads + 2 * kv_heads) + (head * (heads + 2 * kv_heads) if qkv_bias else 0)
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return ModelShape(
        num_params=layers * layer + hidden + vocab * hidden * (1 if tied else 2),
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=kv_heads,
        head_size=head,
        vocab_size=vocab,
    )


def _known(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, bias: bool
) -> ModelShape:
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }
    return llama_shape(config, tied=False, qkv_bias=bias)


SHAPES: Mapping[str, ModelShape] = {
    "1b": _known(2048, 22, 32, 4, 5632, 32_000, bias=False),
    "7b": _known(3584, 28, 28, 4, 18_944, 152_064, bias=True),
    "32b": _known(5120, 64, 40, 8, 27_648, 152_064, bias=True),
}
"""For when the model is not at hand: the shapes of RhoMath-1B (TinyLlama's), Qwen2.5-7B and Qwen2.5-32B."""


def shape_of_folder(folder: Path) -> ModelShape:
    """Of a model in Hugging Face format: sizes from its config, parameters counted in the headers of its safetensors.

    Raises:
        ConfigError: there is no such model, or its config does not name its sizes.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no model whose config.json can be read ({error}); name a known size instead, for example "
            "--model 7b"
        ) from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no *.safetensors to count the parameters of; name a size, such as --model 7b"
        )

    def size(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name)), None)

    hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
    heads, vocab = size("num_attention_heads", "n_head"), size("vocab_size")
    if hidden is None or layers is None or heads is None or vocab is None:
        raise ConfigError(
            f"{folder / 'config.json'} does not name hidden size, layers, attention heads and vocabulary; name a size, "
            "such as --model 7b"
        )
    return ModelShape(
        num_params=sum(map(_num_params, files)),
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=size("num_key_value_heads") or heads,
        head_size=size("head_dim") or hidden // heads,
        vocab_size=vocab,
    )


def _num_params(path: Path) -> int:
    """Numbers in one safetensors file, read from its header alone."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is no safetensors file: its header would have {num_bytes} bytes")
        try:
            header = json.loads(file.read(num_bytes))
        except ValueError as error:
            raise ConfigError(f"{path} is no safetensors file: {error}") from None
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total
