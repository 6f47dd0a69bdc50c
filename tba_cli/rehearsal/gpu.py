"""The GPU that is rehearsed: how much of its memory a trainer process may fill, and the speeds that are assumed where
nobody has given them. The speeds are rules of thumb for an H100, not measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba.config import Recipe
from tba_cli.sizing import GIB, USABLE_SHARE, ModelShape, operations_per_parameter

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


def misfit(recipe: Recipe, trace: Mapping[str, Any], *, num_layers: int, gpu_bytes: int) -> str | None:
    """Return what is too large and which key to change, or None where a process fits on its GPU.

    Args:
        trace: as `python -m tba_trainer.rehearsal` prints it.
        num_layers: of the model.
        gpu_bytes: the memory of the GPU.
    """
    limit, peak = USABLE_SHARE * gpu_bytes, trace["peak_bytes"]
    if peak <= limit:
        return None
    section, state = recipe.trainer, max(trace["state_bytes"], trace["bytes"]["update_peak"])
    longest = recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens
    # what is not state grows with the tokens, but not all of it: so the number is a little too high
    num_tokens = int(trace["plan"]["max_tokens"] * (limit - trace["state_bytes"]) / (peak - trace["state_bytes"]))
    if state > limit:
        adapter = "" if recipe.model.lora else ", or train an adapter ([model.lora])"
        remedy = f"weights, gradients and moments alone take {state / GIB:.3g} GiB; {_more_shards(recipe)}{adapter}"
    elif section.num_recomputed(num_layers) < num_layers:
        remedy = "set trainer.gradient_checkpointing = true"
    elif num_tokens < longest:
        remedy = (
            f"a single rollout of {longest} tokens is too long: lower searcher.max_response_tokens, raise "
            f"trainer.sharding.context (it is {section.sharding.context}: so many processes share a rollout), or "
            f"{_more_shards(recipe)}"
        )
    else:
        remedy = f"lower trainer.micro_batch_tokens from {section.micro_batch_tokens} to about {num_tokens}"
    return (
        f"a trainer process needs {peak / GIB:.3g} GiB, and {limit / GIB:.3g} of the {gpu_bytes / GIB:g} GiB of a GPU "
        f"can be used; {remedy}, and rehearse again"
    )


def _more_shards(recipe: Recipe) -> str:
    """Return how each process holds a smaller part of the model; every replica is whole."""
    num, replicas = recipe.trainer.num_processes, recipe.trainer.sharding.replicas
    more = f"raise trainer.num_processes (it is {num})"
    return f"lower trainer.sharding.replicas (it is {replicas}) or {more}" if replicas > 1 and num > 1 else more


def assumed_tokens_per_s(recipe: Recipe, shape: ModelShape) -> float:
    """Return what a searcher decodes with all slots busy: every decode step reads the weights once."""
    read_s = shape.num_params * (4 if recipe.model.dtype == "float32" else 2) / GPU_BYTES_PER_S
    return recipe.searcher.num_slots / (DECODE_STEP_S + read_s)


def assumed_step_s(recipe: Recipe, shape: ModelShape, *, tokens_per_rollout: float) -> float:
    """Return the seconds of an optimizer step at the speeds of this module."""
    section, sampling = recipe.trainer, recipe.sampling
    num_tokens = sampling.prompts_per_batch * sampling.group_size * tokens_per_rollout
    per_token = operations_per_parameter(recipe, shape) * shape.num_active_params
    speed = GPU_FLOPS_PER_S if section.compute_dtype == "bfloat16" else FLOAT32_FLOPS_PER_S
    return MIN_STEP_S + num_tokens * per_token / (speed * section.num_processes)
