"""Weights as reinforcement learning changes them: a small transformer, pretrained here, then steps of AdamW on rewards.

The language is made by rule: a token follows from the one before half of the time, else Zipf's law draws it. The reward
of a completion is the share of its tokens that are odd or even like the first one of its prompt. The masters are
float32; a version is their cast to bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VOCAB_SIZE = 4096
State = Mapping[str, NDArray[np.uint16]]
"""Tensor name -> the bits of its bfloat16 elements, in its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long the model trains, in steps."""

    num_pretrain: int
    num_before: int
    """Steps on rewards before the first version, so that Adam's second moments are no longer those of a start."""
    distances: Sequence[int]
    """Steps between the first version and each of the later ones."""


def trained_states(learning_rates: Sequence[float], schedule: Schedule, seed: int) -> dict[float, dict[int, State]]:
    """Return learning rate -> steps since the first version (0: itself) -> weights."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    start = _model()
    _pretrain(start, schedule.num_pretrain, rng)
    states: dict[float, dict[int, State]] = {}
    for rate in learning_rates:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
        states[rate] = {}
        for distance in range(-schedule.num_before, max(schedule.distances) + 1):
            if distance in (0, *schedule.distances):
                states[rate][distance] = _bfloat16(model)
            _policy_step(model, optimizer, rng)
    return states


def model_config() -> Any:
    """Return the configuration of the small transformer."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "llama",  # RMSNorm, SwiGLU
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def _model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(model_config(), dtype=torch.float32)


def _bfloat16(model: Any) -> State:
    return {
        name: parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, parameter in model.named_parameters()
    }


def _sentences(rng: np.random.Generator, num_rows: int, length: int) -> Tensor:
    drawn = np.minimum(rng.zipf(1.2, (num_rows, length)), VOCAB_SIZE) - 1
    for column in range(1, length):
        follows = rng.random(num_rows) < 0.5
        drawn[follows, column] = (drawn[follows, column - 1] * 31 + 7) % VOCAB_SIZE
    return torch.from_numpy(drawn)


def _pretrain(model: Any, num_steps: int, rng: np.random.Generator) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    for _ in range(num_steps):
        ids = _sentences(rng, 8, 64)
        model(input_ids=ids, labels=ids).loss.backward()
        _update(model, optimizer)


def _policy_step(model: Any, optimizer: torch.optim.Optimizer, rng: np.random.Generator) -> None:
    """Sample eight completions of each of four prompts; policy gradient with advantages normalised in each group."""
    prompts = _sentences(rng, 4, 8).repeat_interleave(8, dim=0)
    with torch.no_grad():
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=16)
    wanted = prompts[:, :1] % 2
    rewards = (ids[:, 8:] % 2 == wanted).float().mean(1).view(4, 8)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logprobs = model(input_ids=ids).logits[:, 7:-1].log_softmax(-1).gather(2, ids[:, 8:, None])[:, :, 0]  # [32, 16]
    (-(advantages * logprobs).mean()).backward()
    _update(model, optimizer)


def _update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
