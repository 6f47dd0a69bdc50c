"""Models and batches to measure a step with: random weights, random tokens, lengths spread 1:16."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tba.versions import START
from tba.wire import Rollout, Sampling, VersionSpan, float32_bytes, single_turn

Spread = Literal["log-uniform", "uniform"]

VOCAB_SIZE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The input of every way to make a step."""

    model: Any
    rollouts: list[Rollout]
    rewards: NDArray[np.float64]
    micro_batch_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of the batch, without padding."""
        return sum(len(r.prompt_tokens) + len(r.response_tokens) for r in self.rollouts)

    def fresh_model(self) -> Any:
        """The model once more, with the same weights."""
        return copy.deepcopy(self.model)


def make_model() -> Any:
    """A Qwen2 with random float32 weights, in train mode without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_rollouts(
    num_groups: int, group_size: int, longest: int, *, spread: Spread, vocab_size: int, seed: int = 0
) -> tuple[list[Rollout], NDArray[np.float64]]:
    """Rollouts of longest / 16 to `longest` tokens, a quarter of them prompt (one per group), and their rewards."""
    rng = np.random.default_rng(seed)
    shortest = longest // 16
    rollouts = []
    for group in range(num_groups):
        prompt = rng.integers(1, vocab_size, shortest // 4 + int(rng.integers(0, shortest // 2))).astype(np.int32)
        for _ in range(group_size):
            share = rng.random()
            length = shortest * 16**share if spread == "log-uniform" else shortest + share * (longest - shortest)
            response = rng.integers(1, vocab_size, max(1, int(length) - len(prompt))).astype(np.int32)
            rollouts.append(make_rollout(rng, f"prompt-{group}", prompt, response))
    order = rng.permutation(len(rollouts))
    rewards = rng.integers(0, 2, len(rollouts)).astype(np.float64)
    return [rollouts[i] for i in order], rewards


def make_rollout(
    rng: np.random.Generator, prompt_id: str, prompt: NDArray[Any], response: NDArray[Any], *, reward: float = 1.0
) -> Rollout:
    """A rollout with these tokens."""
    return Rollout(
        rollout_id=rng.bytes(16),
        run="bench",
        task="bench",
        prompt_id=prompt_id,
        visit_id="visit",
        sequences=single_turn(prompt, response, "stop"),
        response_text="",
        version_spans=(VersionSpan.of(START, 0, len(response)),),
        sampling=Sampling.of(1.0),
        # near what the untrained model gives: ratios stay inside the clip
        logprob_bytes=float32_bytes(np.full(len(response), -np.log(VOCAB_SIZE))),
        ref_logprob=None,
        reward=reward,
        reward_status="scored",
        reward_reason=None,
        reward_version="bench-1",
        searcher_id="searcher-0",
        started_at_s=1.0,
        finished_at_s=2.0,
    )
