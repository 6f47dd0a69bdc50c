"""Rollouts of a given size, made fast: encoded templates, a fresh id patched into each."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tba.wire import encode_rollout
from tests.support.buffer import make_rollout

ROLLOUTS_PER_PUSH = 64
NUM_OWN_PROMPTS = 128
OTHER_BYTES = 560
"""The size of a test rollout besides its response tokens and log-probs (measured by `num_tokens_for`)."""


def num_tokens_for(num_bytes: int) -> int:
    """Response tokens that make a rollout weigh about `num_bytes` on the wire (8 bytes a token)."""
    return max(3, (num_bytes - OTHER_BYTES) // 8)


class Work:
    """Pushes of 64 rollouts: 8 prompts, 8 rollouts each, rewards 0 to 1, fresh ids.

    Args:
        num_bytes: size of one encoded rollout.
        num_prompts: rollouts go to some of the prompts `train-0` ... `train-<num_prompts - 1>`.
        seed: of prompts and tokens.
    """

    def __init__(self, *, num_bytes: int, num_prompts: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        prompts = rng.choice(num_prompts, min(num_prompts, NUM_OWN_PROMPTS), replace=False)
        self._visits = [[_template(rng, int(p), reward, num_bytes) for reward in range(8)] for p in prompts]
        self._next = 0

    def push(self) -> list[bytes]:
        """64 encoded rollouts."""
        ids = os.urandom(16 * ROLLOUTS_PER_PUSH)
        payloads: list[bytes] = []
        while len(payloads) < ROLLOUTS_PER_PUSH:
            for head, tail in self._visits[self._next]:
                at = 16 * len(payloads)
                payloads.append(head + ids[at : at + 16] + tail)
            self._next = (self._next + 1) % len(self._visits)
        return payloads


def _template(rng: np.random.Generator, prompt: int, reward: int, num_bytes: int) -> tuple[bytes, bytes]:
    num_tokens = num_tokens_for(num_bytes)
    changes: dict[str, Any] = {
        "num_tokens": num_tokens,
        "response_tokens": rng.integers(0, 32_000, num_tokens).astype(np.int32),
        "sampler_logprobs": -rng.random(num_tokens, dtype=np.float32),
        "response_text": "x" * 100,
        "rollout_id": bytes(range(16)),
    }
    head, tail = encode_rollout(make_rollout(f"train-{prompt}", reward=reward / 7, **changes)).split(
        bytes(range(16)), 1
    )
    return head, tail
