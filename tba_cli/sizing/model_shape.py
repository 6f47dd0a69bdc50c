"""The sizes of a decoder that decide how much memory it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tba.config.supervised import NewModel
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
    tied: bool = False
    """Whether the output head is the embedding."""
    config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The sizes in the words of transformers, to build the model of; None: not known."""

    @property
    def num_active_params(self) -> int:
        """Parameters that one token passes through: of a mixture of experts only those of its own experts."""
        experts = _Experts.of(self.config or {})
        num_idle = self.num_layers * (experts.num - experts.num_per_token)
        return self.num_params - num_idle * experts.size(self.hidden_size)

    @property
    def query_size(self) -> int:
        """Numbers that the queries of one token have in a layer."""
        config = self.config or {}
        heads = config.get("num_attention_heads") or config.get("n_head")
        return int(heads) * self.head_size if heads else self.hidden_size

    @property
    def inner_size(self) -> int:
        """Numbers between the products of an MLP for one token: of a mixture of experts those of its own experts."""
        config = self.config or {}
        experts = _Experts.of(config)
        if experts.num:
            return experts.num_per_token * experts.inner
        return int(config.get("intermediate_size") or config.get("n_inner") or 4 * self.hidden_size)

    @property
    def num_layer_params(self) -> int:
        """Parameters of one layer."""
        return (self.num_params - self.num_root_params) // self.num_layers

    @property
    def num_root_params(self) -> int:
        """Parameters that are in no layer: embedding and output head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of each layer of Qwen3-MoE; none in a dense model."""

    num: int = 0
    num_per_token: int = 0
    inner: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Experts:
        # a model with dense layers between those with experts is counted by its files alone
        if config.get("model_type") != "qwen3_moe" or config.get("mlp_only_layers"):
            return cls()
        num = config.get("num_experts") or config["num_local_experts"]  # transformers writes the second name
        return cls(int(num), int(config["num_experts_per_tok"]), int(config["moe_intermediate_size"]))

    def size(self, hidden: int) -> int:
        """Return the parameters of one expert."""
        return 3 * hidden * self.inner


def shape_of_config(config: Mapping[str, Any], *, num_params: int | None = None) -> ModelShape | None:
    """Return the shape by a model's `config.json`, or None where it does not name its sizes.

    Args:
        num_params: as counted; None: computed from the config (Llama's family, GPT-NeoX, GPT-2).
    """

    def size(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name)), None)

    hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
    heads, vocab = size("num_attention_heads", "n_head"), size("vocab_size")
    if hidden is None or layers is None or heads is None or vocab is None:
        return None
    shape = ModelShape(
        num_params=num_params or 0,
        num_layers=layers,
        hidden_size=hidden,
        # a config without it has one key head per query head
        num_kv_heads=size("num_key_value_heads") or heads,
        head_size=size("head_dim") or hidden // heads,
        vocab_size=vocab,
        tied=config.get("tie_word_embeddings", True),
        config=config,
    )
    if num_params is not None:
        return shape
    counted = _layer_and_rest(config, shape, heads)
    return counted and replace(shape, num_params=layers * counted[0] + counted[1] + shape.num_root_params)


def _layer_and_rest(config: Mapping[str, Any], shape: ModelShape, heads: int) -> tuple[int, int] | None:
    """Return the parameters of one layer, and those outside of layers, token embedding and head."""
    family, hidden = config.get("model_type"), shape.hidden_size
    if family == "gpt2":
        inner = int(config.get("n_inner") or 4 * hidden)
        # attention 4h^2 + 4h, MLP 2hi + i + h, two norms 4h; then positions and the last norm
        layer = 4 * hidden**2 + 2 * hidden * inner + inner + 9 * hidden
        return layer, int(config["n_positions"]) * hidden + 2 * hidden
    if "intermediate_size" not in config:
        return None
    inner = int(config["intermediate_size"])
    if family == "gpt_neox":
        return 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden, 2 * hidden
    if family not in LLAMA_FAMILY:
        return None
    head, kv_heads = shape.head_size, shape.num_kv_heads
    # queries and output have all heads, keys and values only kv_heads
    attention = 2 * hidden * head * (heads + kv_heads)
    if family == "qwen2":  # biases of queries, keys and values
        attention += head * (heads + 2 * kv_heads)
    if family in ("qwen3", "qwen3_moe"):  # norms of queries and keys
        attention += 2 * head
    mlp = 3 * hidden * inner
    if family == "qwen3_moe":
        experts = _Experts.of(config)
        if not experts.num:
            return None
        mlp = experts.num * (experts.size(hidden) + hidden)  # and a row of the router
    return attention + mlp + 2 * hidden, hidden


LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def _llama(
    family: str,
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
    return _counted(config)


def _neox(hidden: int, layers: int, heads: int, *, inner: int | None = None, vocab: int = 50_304) -> ModelShape:
    """Return the shape of a GPT-NeoX model, by default one of the Pythia suite."""
    config = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner or 4 * hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    return _counted(config)


def _gpt2(
    hidden: int, layers: int, heads: int, *, inner: int | None = None, positions: int = 1024, vocab: int = 50_257
) -> ModelShape:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions, "vocab_size": vocab}
    return _counted({"model_type": "gpt2", "n_inner": inner, **sizes})


def _counted(config: Mapping[str, Any]) -> ModelShape:
    shape = shape_of_config(config)
    assert shape is not None, "the families of the table can be counted"
    return shape


_EXPERTS_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_TINY_LLAMA = _llama("llama", 2048, 22, (32, 4), 5632, 32_000)
_LLAMA_8B = _llama("llama", 4096, 32, (32, 8), 14_336, 128_256)
SHAPES: Mapping[str, ModelShape] = {
    "1b": _TINY_LLAMA,
    "7b": _llama("qwen2", 3584, 28, (28, 4), 18_944, 152_064),
    "32b": _llama("qwen2", 5120, 64, (40, 8), 27_648, 152_064),
    "quickstart": _llama("llama", 64, 2, (4, 4), 256, 16, tied=True),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "pythia-410m": _neox(1024, 24, 16),
    "pythia-1b": _neox(2048, 16, 8),
    "pythia-2.8b": _neox(2560, 32, 32),
    "pythia-6.9b": _neox(4096, 32, 32, vocab=50_432),
    "rho-1b": _TINY_LLAMA,
    "tinyllama-1.1b": _TINY_LLAMA,
    "llama-3.2-1b": _llama("llama", 2048, 16, (32, 8), 8192, 128_256, tied=True, head=64),
    "llama-3.2-3b": _llama("llama", 3072, 28, (24, 8), 8192, 128_256, tied=True),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-guard-3-8b": _LLAMA_8B,
    "qwen2.5-0.5b": _llama("qwen2", 896, 24, (14, 2), 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _llama("qwen2", 1536, 28, (12, 2), 8960, 151_936, tied=True),
    "qwen2.5-3b": _llama("qwen2", 2048, 36, (16, 2), 11_008, 151_936, tied=True),
    "qwen2.5-7b": _llama("qwen2", 3584, 28, (28, 4), 18_944, 152_064),
    "qwen2.5-14b": _llama("qwen2", 5120, 48, (40, 8), 13_824, 152_064),
    "qwen2.5-32b": _llama("qwen2", 5120, 64, (40, 8), 27_648, 152_064),
    "qwen3-0.6b": _llama("qwen3", 1024, 28, (16, 8), 3072, 151_936, tied=True, head=128),
    "qwen3-1.7b": _llama("qwen3", 2048, 28, (16, 8), 6144, 151_936, tied=True, head=128),
    "qwen3-4b": _llama("qwen3", 2560, 36, (32, 8), 9728, 151_936, tied=True, head=128),
    "qwen3-8b": _llama("qwen3", 4096, 36, (32, 8), 12_288, 151_936, head=128),
    "qwen3-30b-a3b": _llama("qwen3_moe", 2048, 48, (32, 4), 6144, 151_936, head=128, experts=_EXPERTS_30B),
    # an encoder with a classification head: the judge of red-teaming
    "roberta-hate-speech": ModelShape(
        num_params=124_647_170,
        num_layers=12,
        hidden_size=768,
        num_kv_heads=12,
        head_size=64,
        vocab_size=50_265,
        tied=True,
    ),
}
"""Models that need not be at hand. `1b`, `7b` and `32b` are the sizes of RhoMath-1B (TinyLlama's), Qwen2.5-7B and
Qwen2.5-32B; `quickstart` is the model of a warm start."""
MAKER_SHAPES: Mapping[str, ModelShape] = {
    "llama": _llama("llama", 64, 2, (2, 1), 128, 384),
    "llama_chat": _llama("llama", 64, 2, (2, 1), 128, 384),
    "qwen2": _llama("qwen2", 64, 2, (2, 1), 128, 384),
    "gpt_neox": _neox(64, 2, 2, inner=128, vocab=384),
    "gpt2": _gpt2(64, 2, 2, positions=256, vocab=384),
}
"""The models of the makers of policies (tba_cli/starter_models/random_models.py); a test compares them."""
_PYTHIA = re.compile(r"^(?:.*_)?pythia-?([0-9.]+[mb])")
"""CleanRL's names have the owner of the base in front: `EleutherAI_pythia-6.9b-deduped__reward__tldr`."""


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model by its name on the hub or a size such as `7b`, or None where no table has it.

    A suffix after the size (`-Instruct`, `-sft-gsm8k`) does not change the shape.
    """
    text = _PYTHIA.sub(r"pythia-\1", name.lower().rpartition("/")[2])
    names = [known for known in SHAPES if text == known or text.startswith(f"{known}-")]
    # the longest name: `gpt2-medium` begins with `gpt2-` as well
    return SHAPES[max(names, key=len)] if names else None


def shape_of_new_model(section: NewModel) -> ModelShape:
    """Return the shape of a model that `[sft.new_model]` makes; its vocabulary is counted at its most."""
    inner = section.intermediate_size or 4 * section.hidden_size
    sizes, heads, vocab = (section.hidden_size, section.num_layers), section.num_heads, section.vocab_size
    if section.family == "gpt2":
        return _gpt2(*sizes, heads, inner=inner, positions=section.max_length_tokens, vocab=vocab)
    if section.family == "gpt_neox":
        return _neox(*sizes, heads, inner=inner, vocab=vocab)
    return _llama(section.family, *sizes, (heads, heads), inner, vocab, tied=True)


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
    # counted, and not computed: a folder may hold any architecture
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
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total
