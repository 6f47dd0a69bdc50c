"""Estimate memory, disk and network of a run. docs/recipes.md says where each term comes from, and which were measured.

P parameters, N processes of the trainer, T tokens of a micro-batch, L layers, H hidden size, V vocabulary, b bytes of
the published dtype, S searchers, R rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tba.config import Recipe
from tba_cli.sizing.model_shape import ModelShape

F32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_CHUNK_BYTES = 2 * 2**30
"""The output head works on chunks of at most 1 GiB of float32 logits on a GPU, with their gradient."""
START_LOGITS_BYTES = 128 * 2**20
"""The starting model of a searcher works on logits in chunks of this (`LOGITS_BYTES` there)."""
ACTIVATION_BYTES = {"bfloat16": 34, "float32": 68}
"""Per token and hidden unit of a layer that is not recomputed: 34 in 16 bits without attention scores (arXiv
2205.05198, equation 2), twice that in 32."""
ROLLOUT_BYTES = 450
"""Names, times, versions and settings of one rollout on the wire."""
REDIS_FACTOR = 1.3
LORA_SHARE = 0.01
"""Parameters of an adapter as a share of the model's: about 1 % at rank 16 on every linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a run that the recipe does not determine."""

    prompt_tokens: int
    response_tokens: int
    step_s: float
    num_searchers: int
    concurrent_rollouts: int
    """Per searcher."""
    text_bytes_per_token: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The needs of a run, in bytes and bytes per second."""

    trainer_gpu_bytes: int
    """For each process of the trainer."""
    searcher_gpu_bytes: int
    rollout_bytes: int
    redis_bytes: int
    """At the bounds of the recipe."""
    redis_peak_bytes: int
    """While it rewrites its file, at worst."""
    version_bytes: int
    checkpoint_bytes: int
    store_bytes: int
    publish_bytes_per_s: float
    pull_bytes_per_s: float
    """All searchers together."""


def estimate(recipe: Recipe, shape: ModelShape, load: Load) -> Estimate:
    """Return the needs of a run of this recipe with a model of this shape."""
    section, b = recipe.trainer, DTYPE_BYTES[recipe.model.dtype]
    trained = num_trained(recipe, shape)
    version_bytes = shape.num_params * b
    checkpoint_bytes = 3 * F32 * trained
    rollout_bytes = math.ceil(
        ROLLOUT_BYTES
        + F32 * load.prompt_tokens
        + (2 * F32 + load.text_bytes_per_token) * load.response_tokens  # token id, log-prob, text
    )
    stored_bytes = min(recipe.buffer.max_bytes, recipe.buffer.max_rollouts * rollout_bytes)
    redis_bytes = math.ceil(REDIS_FACTOR * stored_bytes)
    sync_s = section.sync_interval * load.step_s
    num_versions = section.keep_versions + recipe.num_lag_versions
    return Estimate(
        trainer_gpu_bytes=trainer_bytes(recipe, shape),
        searcher_gpu_bytes=searcher_bytes(shape, load, dtype_bytes=b, holds_start=recipe.searchers_hold_start),
        rollout_bytes=rollout_bytes,
        redis_bytes=redis_bytes,
        redis_peak_bytes=2 * redis_bytes,
        version_bytes=version_bytes,
        checkpoint_bytes=checkpoint_bytes,
        # one more of each while the next is written; the starting model is kept
        store_bytes=(num_versions + 2) * version_bytes + (section.keep_checkpoints + 2) * checkpoint_bytes,
        publish_bytes_per_s=version_bytes / sync_s,
        pull_bytes_per_s=load.num_searchers * version_bytes / sync_s,
    )


def num_trained(recipe: Recipe, shape: ModelShape) -> int:
    """Return the number of parameters that are trained: all, or those of the adapters."""
    return shape.num_params if recipe.model.lora is None else math.ceil(LORA_SHARE * shape.num_params)


def trainer_state_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Return what all trainer processes hold together between two steps: weights, gradients, moments, reference."""
    trained = num_trained(recipe, shape)
    frozen = 0 if recipe.model.lora is None else shape.num_params
    # with LoRA the disabled adapter is the reference; placement by searchers and behaviour anchors need no copy
    has_copy = (
        recipe.model.lora is None
        and recipe.objective.needs_reference
        and recipe.objective.reference_placement == "trainer"
    )
    return 4 * F32 * trained + F32 * frozen + (F32 * shape.num_params if has_copy else 0)


def trainer_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Return the GPU memory of each trainer process: its state, activations, logits, and what FSDP2 gathers."""
    section, num = recipe.trainer, recipe.trainer.num_processes
    head, trained = shape.vocab_size * shape.hidden_size, num_trained(recipe, shape)
    state = trainer_state_bytes(recipe, shape)
    # without checkpointing the backward pass needs the 16-bit copies of all weights that autocast made
    kept = shape.num_layer_params + head if section.gradient_checkpointing else shape.num_params
    cast = 2 * kept if section.compute_dtype == "bfloat16" else 0
    reduced = 0
    if num > 1:
        # FSDP2: the layer at work, the one that is being fetched, and gradients on their way; the root and the
        # gradient of its head. When the root's gradients are summed, the rest is gone
        gathered = F32 * (4 * shape.num_layer_params + shape.num_root_params + head)
        reduced = 3 * F32 * shape.num_root_params
        state, cast = state // num, cast + gathered
    tokens, per_unit = section.micro_batch_tokens, ACTIVATION_BYTES[section.compute_dtype]
    one_layer = per_unit * tokens * shape.hidden_size
    if section.gradient_checkpointing:
        activations = F32 * tokens * shape.hidden_size * shape.num_layers + one_layer
    else:
        activations = one_layer * shape.num_layers
    logits = min(LOGITS_CHUNK_BYTES, 2 * F32 * tokens * shape.vocab_size)
    optimizer_step = state + F32 * trained // num  # AdamW's temporaries, after the activations are gone
    return max(state + cast + activations + logits, state + reduced, optimizer_step)


def searcher_bytes(shape: ModelShape, load: Load, *, dtype_bytes: int, holds_start: bool) -> int:
    """Return the GPU memory of a searcher: weights, and the key-value cache of the rollouts in progress.

    It leaves out the 1 to 2 GiB that vLLM adds for CUDA graphs and workspaces.

    Args:
        holds_start: it computes ref log-probs, and so holds the starting model beside its engine.
    """
    tokens = load.concurrent_rollouts * (load.prompt_tokens + load.response_tokens)
    num_copies = 2 if holds_start else 1
    start_logits = START_LOGITS_BYTES if holds_start else 0
    return dtype_bytes * (num_copies * shape.num_params + shape.kv_values_per_token * tokens) + start_logits
