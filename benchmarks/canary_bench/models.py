"""The models whose canaries are compared: those of every family, trained here for a minute each, and random ones.

The trained ones have real vocabularies (byte-pair encoding of this repository's own text) and have learnt a part of
that text nearly by heart, so that their logits are as uneven as those of a fine-tuned model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
CONTEXT_TOKENS = 128
SEQUENCE_TOKENS, BATCH_SIZE, NUM_EPOCHS = 64, 4, 8
LEARNING_RATE = 2e-3
_LLAMA = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
_NEOX = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
_GROUPED = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How to make a model."""

    family: str
    vocab_size: int
    """At most: the tokenizer has fewer tokens where the text has no more pairs."""
    sizes: Mapping[str, Any]
    num_layers: int = 4
    tied: bool = False
    initializer_range: float = 0.2
    """0.2 gives a random model logits with a standard deviation of about 2."""
    num_steps: int = 0
    """Of training."""


_EXPERTS = {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_TRAINED: dict[str, Any] = {"vocab_size": 8192, "initializer_range": 0.02, "num_steps": 80}
KINDS = MappingProxyType(
    {
        "trained llama": Kind(family="llama", sizes=_LLAMA, **_TRAINED),
        "trained qwen2, tied": Kind(family="qwen2", sizes=_LLAMA, tied=True, **_TRAINED),
        "trained qwen3": Kind(family="qwen3", sizes={**_LLAMA, "head_dim": 64}, **_TRAINED),
        "trained gpt_neox": Kind(family="gpt_neox", sizes=_NEOX, **_TRAINED),
        "trained gpt2, tied": Kind(family="gpt2", sizes={"n_embd": 256, "n_head": 4}, tied=True, **_TRAINED),
        "trained qwen3_moe": Kind(family="qwen3_moe", sizes={**_LLAMA, **_EXPERTS}, **_TRAINED),
        "random llama": Kind(family="llama", vocab_size=2048, sizes=_GROUPED),
        "random qwen3_moe": Kind(family="qwen3_moe", vocab_size=2048, sizes={**_GROUPED, **_EXPERTS, "head_dim": 32}),
        "trained qwen2, tied, large vocabulary": Kind(
            family="qwen2", sizes=_LLAMA, tied=True, **{**_TRAINED, "vocab_size": 32768, "num_steps": 60}
        ),
        "random llama, 24 layers": Kind(
            family="llama", vocab_size=2048, sizes=_GROUPED, num_layers=24, initializer_range=0.1
        ),
    }
)


def repository_texts() -> list[str]:
    """Return the text of this repository's documentation and sources."""
    paths = [
        *ROOT.glob("docs/**/*.md"),
        *(p for part in ("tba", "tba_cli", "services") for p in ROOT.glob(f"{part}/**/*.py")),
    ]
    return [path.read_text() for path in sorted(paths)]


def make_model(folder: Path, kind: Kind, *, max_steps: int | None = None) -> dict[str, float]:
    """Write a model in float32 and its tokenizer into `folder`; return its size, and its loss if it was trained.

    Args:
        max_steps: most steps of training; None: those of the kind.
    """
    disable_progress_bar()
    texts = repository_texts()
    tokenizer = _tokenizer(texts, kind.vocab_size)
    names = ("n_layer", "n_positions") if kind.family == "gpt2" else ("num_hidden_layers", "max_position_embeddings")
    config = AutoConfig.for_model(
        kind.family, **kind.sizes, **dict(zip(names, (kind.num_layers, CONTEXT_TOKENS), strict=True)),
        vocab_size=len(tokenizer), tie_word_embeddings=kind.tied, initializer_range=kind.initializer_range,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = {"num_parameters": float(model.num_parameters()), "vocab_size": float(len(tokenizer))}
    num_steps = kind.num_steps if max_steps is None else min(kind.num_steps, max_steps)
    if num_steps:
        found["loss"] = _train(model, tokenizer("\n".join(texts), verbose=False)["input_ids"], num_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return found


def _tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    core = ByteLevelBPETokenizer()
    core.train_from_iterator(texts, vocab_size, special_tokens=["<eos>", "<pad>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, eos_token="<eos>", pad_token="<pad>")


def _train(model: Any, tokens: list[int], num_steps: int) -> float:
    """Train on the first part of the text, several times over; return the mean loss of the last ten steps."""
    num_rows = max(BATCH_SIZE, num_steps * BATCH_SIZE // NUM_EPOCHS)
    rows = torch.tensor(tokens[: num_rows * SEQUENCE_TOKENS]).view(-1, SEQUENCE_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    rng, losses = np.random.default_rng(0), []
    for _ in range(num_steps):
        batch = rows[torch.from_numpy(rng.choice(len(rows), BATCH_SIZE, replace=False))]
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-10:]))
