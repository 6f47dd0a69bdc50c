"""Estimate memory, disk and network of a run. docs/recipes.md says where each term comes from, and which were measured.

P parameters, N processes of the trainer, T tokens of a micro-batch, L layers, H hidden size, V vocabulary, b bytes of
the published dtype, S searchers, R rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tba.config import Recipe, TrainerSection
from tba_cli.sizing.model_shape import ModelShape

F32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_CHUNK_BYTES = 2 * 2**30
"""The output head works on chunks of at most 1 GiB of float32 logits on a GPU, with their gradient."""
START_LOGITS_BYTES = 128 * 2**20
"""The starting model of a searcher works on logits in chunks of this (`LOGITS_BYTES` there)."""
ACTIVATION_BYTES = {"bfloat16": (28, 6, 8, 7), "float32": (28, 12, 16, 10)}
"""What a layer that is not recomputed keeps for one token: bytes for each number of the residual stream (float32 in
both), of queries and of keys, between the products of a gated MLP, and of normed queries and keys. Fitted to the
trace of Llama, Qwen2 and Qwen3 on fake tensors, and above that of GPT-2 and GPT-NeoX, whose MLP has no gate."""
NORMED_QUERIES = ("qwen3", "qwen3_moe")
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
    start_bytes = shape.num_params * b
    is_adapter = recipe.model.lora is not None and recipe.model.lora.publish == "adapter"
    version_bytes = F32 * trained if is_adapter else start_bytes
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
        store_bytes=start_bytes
        + (num_versions + 1) * version_bytes
        + (section.keep_checkpoints + 2) * checkpoint_bytes,
        publish_bytes_per_s=version_bytes / sync_s,
        pull_bytes_per_s=load.num_searchers * version_bytes / sync_s,
    )


def num_trained(recipe: Recipe, shape: ModelShape) -> int:
    """Return the number of parameters that are trained: all, or those of the adapters."""
    return shape.num_params if recipe.model.lora is None else math.ceil(LORA_SHARE * shape.num_params)


def trainer_state_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Return what each trainer process holds between two steps: weights, gradients, moments, copies of the model."""
    section, trained = recipe.trainer, num_trained(recipe, shape)
    if section.num_processes > 1 and section.sharding.cpu_offload:
        return 0
    frozen = 0 if recipe.model.lora is None else shape.num_params
    # with LoRA the disabled adapter is the reference; placement by searchers and behaviour anchors need no copy
    has_copy = (
        recipe.model.lora is None
        and recipe.objective.needs_reference
        and recipe.objective.reference_placement == "trainer"
    )
    whole = 4 * F32 * trained + F32 * frozen + (F32 * shape.num_params if has_copy else 0)
    # the canary of a version is computed by a model that has its weights as they are published
    rounds_weights = section.num_processes > 1 and section.compute_dtype == "bfloat16"
    if recipe.model.dtype != "float32" or recipe.model.lora is not None or rounds_weights:
        whole += DTYPE_BYTES[recipe.model.dtype] * shape.num_params
    return whole * section.sharding.replicas // section.num_processes if section.num_processes > 1 else whole


def trainer_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Return the GPU memory of each trainer process: its state, activations, logits, and copies of weights."""
    section, state = recipe.trainer, trainer_state_bytes(recipe, shape)
    copies, reduced = _copies_bytes(recipe, shape)
    tokens = -(-section.micro_batch_tokens // section.context)  # of this process
    num_recomputed = section.num_recomputed(shape.num_layers)
    # a layer that is computed again has all of its own at that time, when those that keep them are done
    num_kept = max(1, shape.num_layers - num_recomputed)
    activations = F32 * tokens * shape.hidden_size * num_recomputed
    activations += num_kept * tokens * layer_activation_bytes(shape, section.compute_dtype)
    activations += _shared_keys_bytes(section, shape, num_kept)
    logits = min(LOGITS_CHUNK_BYTES, 2 * F32 * tokens * shape.vocab_size)
    return state + max(copies + activations + logits, reduced)


def _shared_keys_bytes(section: TrainerSection, shape: ModelShape, num_kept: int) -> int:
    """Return what a process of a context group holds of the others' keys and values, in layers that keep theirs.

    Args:
        num_kept: of these layers.
    """
    if section.context == 1:
        return 0
    values = 2 * shape.num_kv_heads * shape.head_size * section.micro_batch_tokens
    width = DTYPE_BYTES[section.compute_dtype]
    # kept in each layer; in the layer at work what was gathered, and its gradient, which is summed in float32
    return values * (num_kept * width + width + 2 * F32)


def operations_per_parameter(recipe: Recipe, shape: ModelShape) -> float:
    """Return the operations of a step for each parameter and token: 6, and 2 for each layer that is computed again."""
    return 6 + 2 * recipe.trainer.num_recomputed(shape.num_layers) / shape.num_layers


def fewest_recomputed(recipe: Recipe, shape: ModelShape, *, most_bytes: int) -> int | None:
    """Return the least number of layers to compute again so that a trainer process takes no more; None: none does.

    Args:
        most_bytes: of GPU memory.
    """
    for num in range(shape.num_layers + 1):
        section = recipe.trainer.model_copy(update={"gradient_checkpointing": num or False})
        if trainer_bytes(recipe.model_copy(update={"trainer": section}), shape) <= most_bytes:
            return num
    return None


def layer_activation_bytes(shape: ModelShape, compute_dtype: Literal["bfloat16", "float32"]) -> int:
    """Return what one layer keeps of one token for its backward pass."""
    residual, attention, inner, normed = ACTIVATION_BYTES[compute_dtype]
    query, key = shape.query_size, shape.num_kv_heads * shape.head_size
    kept = residual * shape.hidden_size + attention * (query + key) + inner * shape.inner_size
    return kept + (normed * (query + key) if (shape.config or {}).get("model_type") in NORMED_QUERIES else 0)


def _copies_bytes(recipe: Recipe, shape: ModelShape) -> tuple[int, int]:
    """Return the copies of weights, and gradients on their way, during a pass; and what is held as it ends, alone."""
    section, head = recipe.trainer, shape.vocab_size * shape.hidden_size
    is_narrow = section.compute_dtype == "bfloat16"
    if section.num_processes == 1:
        # the backward pass of a layer that is not computed again needs the 16-bit copies of weights that autocast made
        num_recomputed = section.num_recomputed(shape.num_layers)
        kept = max(1, shape.num_layers - num_recomputed) * shape.num_layer_params + head
        return 2 * (kept if num_recomputed else shape.num_params) if is_narrow else 0, 0
    # FSDP2: the layer at work, the one that is being fetched, and two gradients on their way, summed in float32: 16
    # bytes in both dtypes; the root and the gradient of its head. When gradients of the root are summed, the rest is
    # gone
    width, root = 2 if is_narrow else F32, shape.num_root_params
    copies = 4 * F32 * shape.num_layer_params + width * root + F32 * head
    reduced = (2 * width + F32) * root
    if not section.sharding.reshard_after_forward:
        copies += width * (shape.num_params - root)
    if not section.sharding.reduce_each_micro_batch:
        copies, reduced = (each + F32 * num_trained(recipe, shape) for each in (copies, reduced))
    return copies, reduced


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
