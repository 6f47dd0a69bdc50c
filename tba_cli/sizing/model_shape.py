"""The sizes of a model that decide how much memory it takes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.errors import ConfigError

MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer: a decoder, or an encoder that judges."""

    num_params: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    config: Mapping[str, Any] = field(compare=False, repr=False)
    """The sizes in the words of transformers, to build the model of."""

    @property
    def inner_size(self) -> int:
        """Numbers between the products of an MLP for one token: of a mixture of experts those of its own experts."""
        if experts := self.config.get("num_experts_per_tok"):
            return int(experts) * int(self.config["moe_intermediate_size"])
        return int(self.config.get("intermediate_size") or self.config.get("n_inner") or 4 * self.hidden_size)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


def shape_of_config(config: Mapping[str, Any], *, num_params: int) -> ModelShape | None:
    """Return the shape by a model's `config.json`, or None where it does not name its sizes."""

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


def _known(num_params: int, config: Mapping[str, Any]) -> ModelShape:
    shape = shape_of_config(config, num_params=num_params)
    assert shape is not None, "the table names all sizes"
    return shape


def _llama(
    family: str,
    num_params: int,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    inner: int,
    vocab: int,
    *,
    tied: bool = False,
    head: int = 0,
    experts: Mapping[str, int] | None = None,
) -> ModelShape:
    """Return the shape of a model of Llama's family; `heads` are those of queries and of keys."""
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "head_dim": head or hidden // heads[0],
        **(experts or {}),
    }
    return _known(num_params, config)


def _neox(num_params: int, hidden: int, layers: int, heads: int, *, vocab: int = 50_304) -> ModelShape:
    config = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    return _known(num_params, config)


def _gpt2(num_params: int, hidden: int, layers: int, heads: int) -> ModelShape:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50_257}
    return _known(num_params, {"model_type": "gpt2", **sizes})


_TINY_LLAMA = _llama("llama", 1_100_048_384, 2048, 22, (32, 4), 5632, 32_000)
_LLAMA_8B = _llama("llama", 8_030_261_248, 4096, 32, (32, 8), 14_336, 128_256)
_QWEN_7B = _llama("qwen2", 7_615_616_512, 3584, 28, (28, 4), 18_944, 152_064)
_QWEN_32B = _llama("qwen2", 32_763_876_352, 5120, 64, (40, 8), 27_648, 152_064)
_EXPERTS_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_ROBERTA = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50_265}
SHAPES: Mapping[str, ModelShape] = {
    "1b": _TINY_LLAMA,
    "7b": _QWEN_7B,
    "32b": _QWEN_32B,
    "quickstart": _llama("llama", 132_416, 64, 2, (4, 4), 256, 16, tied=True),
    "gpt2": _gpt2(124_439_808, 768, 12, 12),
    "pythia-410m": _neox(405_334_016, 1024, 24, 16),
    "pythia-1b": _neox(1_011_781_632, 2048, 16, 8),
    "pythia-2.8b": _neox(2_775_208_960, 2560, 32, 32),
    "pythia-6.9b": _neox(6_857_302_016, 4096, 32, 32, vocab=50_432),
    "rho-1b": _TINY_LLAMA,
    "llama-3.2-1b": _llama("llama", 1_235_814_400, 2048, 16, (32, 8), 8192, 128_256, tied=True, head=64),
    "llama-3.2-3b": _llama("llama", 3_212_749_824, 3072, 28, (24, 8), 8192, 128_256, tied=True),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-guard-3-8b": _LLAMA_8B,
    "qwen2.5-0.5b": _llama("qwen2", 494_032_768, 896, 24, (14, 2), 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _llama("qwen2", 1_543_714_304, 1536, 28, (12, 2), 8960, 151_936, tied=True),
    "qwen2.5-7b": _QWEN_7B,
    "qwen2.5-14b": _llama("qwen2", 14_770_033_664, 5120, 48, (40, 8), 13_824, 152_064),
    "qwen2.5-32b": _QWEN_32B,
    "qwen3-0.6b": _llama("qwen3", 596_049_920, 1024, 28, (16, 8), 3072, 151_936, tied=True, head=128),
    "qwen3-1.7b": _llama("qwen3", 1_720_574_976, 2048, 28, (16, 8), 6144, 151_936, tied=True, head=128),
    "qwen3-4b": _llama("qwen3", 4_022_468_096, 2560, 36, (32, 8), 9728, 151_936, tied=True, head=128),
    "qwen3-8b": _llama("qwen3", 8_190_735_360, 4096, 36, (32, 8), 12_288, 151_936, head=128),
    "qwen3-30b-a3b": _llama(
        "qwen3_moe", 30_532_122_624, 2048, 48, (32, 4), 6144, 151_936, head=128, experts=_EXPERTS_30B
    ),
    # an encoder with a classification head: the judge of red-teaming
    "roberta-hate-speech": _known(124_647_170, _ROBERTA),
}
"""Models that need not be at hand, with the parameters that were published. `1b`, `7b` and `32b` are the sizes of
RhoMath-1B (TinyLlama's), Qwen2.5-7B and Qwen2.5-32B; `quickstart` is the model of a warm start."""
_PYTHIA = re.compile(r"^(?:.*_)?pythia-?([0-9.]+[mb])")
"""CleanRL's names have the owner of the base in front: `EleutherAI_pythia-6.9b-deduped__reward__tldr`."""


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model by its name on the hub or a size such as `7b`, or None where no table has it.

    A suffix after the size (`-Instruct`, `-sft-gsm8k`) does not change the shape.
    """
    text = _PYTHIA.sub(r"pythia-\1", name.lower().rpartition("/")[2])
    if re.match(r"gpt2-(medium|large|xl)", text):  # sizes, and no suffixes
        return None
    return next((SHAPES[known] for known in SHAPES if text == known or text.startswith(f"{known}-")), None)


def shape_of_folder(folder: Path) -> ModelShape:
    """Return the shape of a model folder: sizes from its config, parameters counted in the headers of its safetensors.

    Raises:
        ConfigError: there is no such model, or its config does not name its sizes.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no model whose config.json can be read ({error})") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no *.safetensors to count the parameters of")
    shape = shape_of_config(config, num_params=sum(map(_num_params, files)))
    if shape is None:
        raise ConfigError(f"{folder / 'config.json'} does not name hidden size, layers, attention heads and vocabulary")
    return shape


def _num_params(path: Path) -> int:
    """Return the number of parameters in a safetensors file, read from its header alone."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        # the first eight bytes of any other file, read as a length, are far above it
        if num_bytes > MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is not a safetensors file: its header would have {num_bytes} bytes")
        try:
            header = json.loads(file.read(num_bytes))
        except ValueError as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from None
    tensors = (tensor for name, tensor in header.items() if name != "__metadata__")
    return sum(math.prod(tensor["shape"]) for tensor in tensors)
