"""A tiny random causal language model with a character tokenizer, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

CHARS = "0123456789+-*/=(),.:?;<>_ \nNAQ"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2

Architecture = Literal["llama", "qwen2", "qwen3_moe", "gpt_neox"]


def make_tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per character of `CHARS`, and pad, eos and unk, which it never adds itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_tiny_model(
    folder: str | Path,
    seed: int = 0,
    *,
    architecture: Architecture = "llama",
    tied: bool = False,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int | None = None,
) -> Path:
    """Write a random model (33 tokens, about 0.1 M parameters by default) and its tokenizer; returns the folder.

    Args:
        folder: made if absent; receives config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
        seed: the same seed gives the same weights.
        architecture: llama, qwen2 and qwen3_moe have grouped keys and values. gpt_neox has rotary positions on a part
            of each head. qwen3_moe sends every token to 2 of 8 experts, which are as wide as the hidden state.
        tied: the output embedding is the input embedding; model.safetensors then lacks `lm_head.weight`.
        vocab_size: number of token ids of the model; None: as many as the tokenizer has.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer()
    shared = {
        "vocab_size": vocab_size or len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }
    if architecture != "gpt_neox":
        shared["num_key_value_heads"] = num_kv_heads
    if architecture == "qwen3_moe":
        shared |= {"head_dim": hidden_size // num_heads, "num_experts": 8, "num_experts_per_tok": 2}
        shared |= {"moe_intermediate_size": hidden_size, "norm_topk_prob": True}
    config = AutoConfig.for_model(architecture, **shared)
    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        torch.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
