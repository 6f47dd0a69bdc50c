"""Estimate the memory and disk that a run needs, without the trainer, by the formulas in docs/recipes.md.

The memory of the trainer's step is traced (`tba_trainer.memory_trace`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tba.config import Recipe
from tba_cli.sizing.model_shape import ModelShape

F32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROLLOUT_BYTES = 450
"""Names, times, versions and settings of one rollout on the wire."""
TEXT_BYTES_PER_TOKEN = 4
REDIS_FACTOR = 1.3
LORA_SHARE = 0.01
"""Parameters of an adapter as a share of the model's: about 1 % at rank 16 on every linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The needs of a run, in bytes."""

    weights_bytes: int
    """Weights of each searcher, in the published dtype."""
    kv_cache_bytes: int
    """Key-value cache of each searcher, with a rollout of full length in each of its `searcher.num_slots` rows; twice
    that with environments, as the embedded engine keeps the turns before."""
    rollout_bytes: int
    """One stored rollout of full length."""
    redis_bytes: int
    """Memory of Redis when the buffer is full (`buffer.max_bytes`, `buffer.max_rollouts`)."""
    redis_peak_bytes: int
    """Memory of Redis while it rewrites its append-only file, at worst."""
    version_bytes: int
    checkpoint_bytes: int
    store_bytes: int


def estimate(recipe: Recipe, shape: ModelShape) -> Estimate:
    """Return the needs of a run of this recipe with a model of this shape."""
    section, searcher, b = recipe.trainer, recipe.searcher, DTYPE_BYTES[recipe.model.dtype]
    start_bytes = shape.num_params * b
    trained = shape.num_params if recipe.model.lora is None else math.ceil(LORA_SHARE * shape.num_params)
    version_bytes = start_bytes if recipe.model.lora is None else F32 * trained
    checkpoint_bytes = 3 * F32 * trained
    longest = searcher.max_prompt_tokens + searcher.max_response_tokens
    # of each response token its id, its log-prob and its text
    response_bytes = (2 * F32 + TEXT_BYTES_PER_TOKEN) * searcher.max_response_tokens
    rollout_bytes = ROLLOUT_BYTES + F32 * searcher.max_prompt_tokens + response_bytes
    redis_bytes = math.ceil(REDIS_FACTOR * min(recipe.buffer.max_bytes, recipe.buffer.max_rollouts * rollout_bytes))
    # one more of each while the next is written; the starting model is kept
    num_versions = section.keep_versions + recipe.num_lag_versions + 1
    return Estimate(
        weights_bytes=start_bytes,
        kv_cache_bytes=b * shape.kv_values_per_token * longest * searcher.num_slots * (2 if recipe.environments else 1),
        rollout_bytes=rollout_bytes,
        redis_bytes=redis_bytes,
        redis_peak_bytes=2 * redis_bytes,
        version_bytes=version_bytes,
        checkpoint_bytes=checkpoint_bytes,
        store_bytes=start_bytes + num_versions * version_bytes + (section.keep_checkpoints + 2) * checkpoint_bytes,
    )
