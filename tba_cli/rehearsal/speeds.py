"""Speeds that a rehearsal assumes where nobody has given them. Rules of thumb for an H100, not measurements."""

from __future__ import annotations

from tba.config import Recipe
from tba_cli.sizing import ModelShape

GPU_FLOPS_PER_S = 0.4 * 989e12
"""40 % of the dense bfloat16 peak of an H100 SXM."""
FLOAT32_FLOPS_PER_S = 0.4 * 67e12
GPU_BYTES_PER_S = 0.5 * 3.35e12
"""Half of its memory bandwidth."""
DECODE_STEP_S = 0.005
"""What a decode step takes beside reading the weights."""
MIN_STEP_S = 0.5
"""What an optimizer step takes beside the passes."""
STORE_BYTES_PER_S = 2.0**30


def assumed_tokens_per_s(recipe: Recipe, shape: ModelShape) -> float:
    """Return what a searcher decodes with all slots busy: every decode step reads the weights once."""
    read_s = shape.num_params * (4 if recipe.model.dtype == "float32" else 2) / GPU_BYTES_PER_S
    return recipe.searcher.num_slots / (DECODE_STEP_S + read_s)


def assumed_step_s(recipe: Recipe, shape: ModelShape, *, tokens_per_rollout: float) -> float:
    """Return the seconds of an optimizer step: 6 operations per parameter and token, 8 where layers are recomputed."""
    section, sampling = recipe.trainer, recipe.sampling
    num_tokens = sampling.prompts_per_batch * sampling.group_size * tokens_per_rollout
    per_token = (8 if section.gradient_checkpointing else 6) * shape.num_params
    speed = GPU_FLOPS_PER_S if section.compute_dtype == "bfloat16" else FLOAT32_FLOPS_PER_S
    return MIN_STEP_S + num_tokens * per_token / (speed * section.num_processes)
