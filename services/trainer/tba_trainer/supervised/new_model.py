"""A model from nothing: random weights, and a byte-level BPE tokenizer trained on the texts of the examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tba.config.supervised import NewModel
from tba.errors import ConfigError

EOS, PAD = "<|endoftext|>", "<|padding|>"
_TIED = {"llama": True, "qwen2": True, "gpt2": True, "gpt_neox": False}
"""Whether the small models of a family share the weights of embedding and output head."""
_MAX_CHARS = 20_000
"""Of a text that the tokenizer is trained on: the time grows with the square of a word's length, such as base64's."""


def train_tokenizer(texts: Iterable[str], section: NewModel) -> PreTrainedTokenizerFast:
    """Train a tokenizer; it can write any text, and no token joins two digits.

    Raises:
        ConfigError: the vocabulary has no room for the 256 bytes and the special tokens.
    """
    specials = [EOS, PAD, *section.special_tokens]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if section.vocab_size < len(alphabet) + len(specials):
        raise ConfigError(
            f"new_model.vocab_size is {section.vocab_size}, and {len(alphabet)} bytes and {len(specials)} special "
            f"tokens need {len(alphabet) + len(specials)}; raise it"
        )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=section.vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator((text[:_MAX_CHARS] for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=section.max_length_tokens,
        clean_up_tokenization_spaces=False,
    )


def new_config(section: NewModel, tokenizer: Any, **more: Any) -> PreTrainedConfig:
    """Return the config of the model, with as many entries as the tokenizer has.

    Args:
        more: other values, for example the labels of a classifier.
    """
    inner = section.intermediate_size or 4 * section.hidden_size
    if section.family == "gpt2":
        sizes = {
            "n_embd": section.hidden_size,
            "n_inner": inner,
            "n_layer": section.num_layers,
            "n_head": section.num_heads,
            "n_positions": section.max_length_tokens,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        }
    else:
        sizes = {
            "hidden_size": section.hidden_size,
            "intermediate_size": inner,
            "num_hidden_layers": section.num_layers,
            "num_attention_heads": section.num_heads,
            "max_position_embeddings": section.max_length_tokens,
        }
    if section.family in ("llama", "qwen2"):
        sizes["num_key_value_heads"] = section.num_heads
    return AutoConfig.for_model(
        section.family,
        vocab_size=len(tokenizer),
        initializer_range=section.initializer_range,
        tie_word_embeddings=_TIED[section.family],
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
        **more,
    )
