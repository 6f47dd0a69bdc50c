"""The sizes of a model that decide how much memory it takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba_cli.starter_models.weight_files import tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a transformer: a decoder, or an encoder that classifies."""

    num_params: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    config: Mapping[str, Any] = field(compare=False, repr=False)
    """The sizes under the names of transformers (config.json), from which the model can be built."""

    @property
    def inner_size(self) -> int:
        """Width of the MLP's hidden layer for one token; in a mixture of experts, summed over the token's experts."""
        if experts := self.config.get("num_experts_per_tok"):
            return int(experts) * int(self.config["moe_intermediate_size"])
        return int(self.config.get("intermediate_size") or self.config.get("n_inner") or 4 * self.hidden_size)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


def shape_of_config(config: Mapping[str, Any], *, num_params: int) -> ModelShape | None:
    """Return the shape by a model's `config.json`, or None if it does not name the sizes."""

    def size(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name)), None)

    hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
    heads, vocab = size("num_attention_heads", "n_head"), size("vocab_size")
    if hidden is None or layers is None or heads is None or vocab is None:
        return None
    return ModelShape(
        num_params=num_params,
        num_layers=layers,
        hidden_size=hidden,
        # a config without it has one key head per query head
        num_kv_heads=size("num_key_value_heads") or heads,
        head_size=size("head_dim") or hidden // heads,
        vocab_size=vocab,
        config=config,
    )


def shape_of_warm_start() -> ModelShape:
    """Return the shape of the model that a warm start makes (`starter_models/starting_model.py`)."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = {"model_type": "llama", **sizes, "vocab_size": 16, "tie_word_embeddings": True}
    shape = shape_of_config(config, num_params=132_416)
    assert shape is not None, "it names all sizes"
    return shape


def shape_of_folder(folder: Path) -> ModelShape:
    """Return the shape of a model folder: sizes from its config, parameters counted in its safetensors headers."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no model whose config.json can be read ({error})") from None
    num_params = sum(math.prod(header["shape"]) for header in tensors_of(folder).values())
    shape = shape_of_config(config, num_params=num_params)
    if shape is None:
        raise ConfigError(f"{folder / 'config.json'} does not name hidden size, layers, attention heads and vocabulary")
    return shape
