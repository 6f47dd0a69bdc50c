"""Lay the models of a run out on its GPUs, in the order in which they are loaded.

    reward models and judges -> trainer -> searchers: the starting model, then the engine

`tba run` starts the reward service first and waits until all its models are loaded, those for `tba evaluate` too; its
processes load at the same time, and so do searchers. A searcher waits for the first version, which the trainer
publishes with its model on the GPU. `tba evaluate` after a run holds no more than the reward service and a searcher
with the starting model do: the evaluator uses the GPU of the first searcher.

vLLM takes `gpu_memory_share` of the *total* memory of a GPU, and does not start where less is *free* at that moment
(`request_memory` in vllm/v1/worker/utils.py of vLLM 0.32). It measures the free memory after CUDA and whatever the same
process has loaded before (`Worker.init_device`), so that the starting model is outside its share.

All of this is computed. Shares and weights are certain; activations, caches and what CUDA itself takes are estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from tba.config import Recipe
from tba.config.reward import ModelScorerSpec, RedteamSpec, RewardModelSpec
from tba.config.searcher import ENGINES, VllmSection, check_tensor_parallel
from tba.errors import ConfigError
from tba_cli.sizing.estimate import (
    DTYPE_BYTES,
    F32,
    START_LOGITS_BYTES,
    layer_activation_bytes,
    trainer_bytes,
    trainer_state_bytes,
)
from tba_cli.sizing.model_shape import ModelShape

GIB = 2**30
PROCESS_BYTES = 1 * GIB
"""CUDA's context, kernels and NCCL, for each process on a GPU: measured 0.74 GiB on an H200 without NCCL."""
VLLM_BYTES = 2 * GIB
"""Activations, CUDA graphs and work space within vLLM's share: assumed, not measured (1 to 2 GiB)."""
START_PASS_TOKENS = 4096
"""The starting model of a searcher reads this many tokens at once (`PASS_TOKENS` there)."""
SAMPLED_COPIES = 4
"""Float32 rows of the vocabulary's size for each reply that a victim draws: logits, probabilities, noise, the drawn."""
TEMPLATE_TOKENS = 128
"""Around an attack, in the victim's prompt; those of Alpaca and Llama have 30 to 50."""
NO_GPU_ENGINES = ("simulated", "openai")
"""A searcher with one of them has no model on a GPU but, perhaps, the starting model."""
SHARE_KEY = "searcher.vllm.gpu_memory_share"
SERVICES = frozenset({"reward", "trainer", "searcher"})
ShapeOf = Callable[[str], ModelShape]
"""Returns the sizes of the model in a folder that the recipe names, or raises ConfigError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A model on a GPU."""

    who: str
    fixed_bytes: int = 0
    """Certain: weights, of the trainer gradients and moments too."""
    peak_bytes: int = 0
    """The most that it holds, as estimated; of vLLM: the least that it needs, with room for one rollout."""
    full_bytes: int = 0
    """Of vLLM: with room for as many rollouts of full length as it has slots."""
    share: float | None = None
    """Of the GPU's total memory, which vLLM takes."""
    keeps_share: bool = True
    """False with a size of its own for keys and values: vLLM then asks for the share only at its start."""
    share_key: str = ""
    """The setting of this share."""
    unknown: str = ""
    """Why its sizes are unknown; it is then counted as nothing."""
    service: str = ""
    """Whose processes start at the same time."""
    begins_process: bool = False
    """Whether it is the first of its process on this GPU."""

    def bytes_on(self, total_bytes: int, *, certain: bool = False) -> int:
        """Return what it takes of a GPU with this much memory; `certain`: the share or the weights alone."""
        if self.share is None:
            return self.fixed_bytes if certain else self.peak_bytes
        share_bytes = math.ceil(self.share * total_bytes)
        return share_bytes if certain else max(share_bytes, self.peak_bytes)


Layout = Mapping[int, tuple[Occupant, ...]]
"""Number of the GPU -> who is on it, in the order of start."""


def gpu_layout(
    recipe: Recipe, shape_of: ShapeOf, *, services: Collection[str] = SERVICES, is_container: bool = False
) -> Layout:
    """Return who is on which GPU, in the order of start; empty where the recipe asks for no GPU.

    Args:
        services: those that are counted.
        is_container: each of them has a container of its own, with its own GPUs: `[local.gpus]` is not read, and a
            searcher is alone.

    Raises:
        ConfigError: a device has a number for which `local.gpus` names no GPU, or is no device.
    """
    if not asks_for_gpus(recipe):
        return {}
    gpus = recipe.local.gpus
    found: dict[int, list[Occupant]] = {}

    def put(service: str, key: str, device: str, visible: Sequence[int] | None, own: Iterator[Occupant]) -> None:
        number = _number(key, device, None if is_container else visible)
        if number is not None:
            on_gpu = found.setdefault(number, [])
            on_gpu += [replace(one, service=service, begins_process=n == 0) for n, one in enumerate(own)]

    if "reward" in services:
        for key, spec in _model_processes(recipe).items():
            put("reward", f"{key}.device", spec.device, gpus.reward, _models_of(key, spec, shape_of))
    if "trainer" in services:
        num, device = recipe.trainer.num_processes, recipe.trainer.device
        for rank in range(num):
            own = f"{device}:{rank}" if num > 1 else device
            put("trainer", "trainer.device", own, gpus.trainer, _trainer(recipe, shape_of))
    if "searcher" in services:
        for index in range(1 if is_container else recipe.searcher.num_searchers):
            visible = None if gpus.searchers is None else gpus.searchers[index % len(gpus.searchers)]
            num_ranks, device = recipe.searcher.tensor_parallel_size, recipe.searcher.device
            for rank in range(num_ranks):
                own = f"{device}:{rank}" if num_ranks > 1 and device == "cuda" else device
                put("searcher", "searcher.device", own, visible, _searcher(recipe, shape_of, rank))
    return {number: tuple(occupants) for number, occupants in sorted(found.items()) if occupants}


def named_gpus(recipe: Recipe) -> set[int]:
    """Return the numbers of the GPUs in `[local.gpus]`."""
    gpus = recipe.local.gpus
    return {*(gpus.reward or ()), *(gpus.trainer or ()), *(number for own in gpus.searchers or () for number in own)}


def asks_for_gpus(recipe: Recipe) -> bool:
    """Return whether the recipe names a CUDA device or `[local.gpus]`; a scorer's `auto` alone asks for none."""
    devices = [recipe.trainer.device, recipe.searcher.device]
    devices += [spec.device for spec in _model_processes(recipe).values()]
    return any(device.startswith("cuda") for device in devices) or bool(named_gpus(recipe))


def _number(key: str, device: str, visible: Sequence[int] | None) -> int | None:
    """Return the GPU that a device is, or None where it is none.

    Args:
        visible: the GPUs that the process sees; None: all.
    """
    # `auto` takes the first GPU where there is one, and the recipe asks for some
    kind, _, index = ("cuda" if device == "auto" else device).partition(":")
    if kind != "cuda":
        return None
    if not (index or "0").isdecimal():
        raise ConfigError(f"{key} {device!r} is no device; write cuda, or cuda:1 for the second GPU")
    number = int(index or 0)
    if visible is None:
        return number
    if number >= len(visible):
        raise ConfigError(
            f"{key} {device!r} is GPU {number} of those that its process sees, and local.gpus gives it {len(visible)} "
            "(the first is 0); correct one of them"
        )
    return visible[number]


def _model_processes(recipe: Recipe) -> dict[str, ModelScorerSpec]:
    """Return the scorers with networks by their key; scorers with the same models share a process, the first one's."""
    found: dict[str, ModelScorerSpec] = {}
    known = set()
    for task, reward in recipe.reward.tasks.items():
        for number, spec in enumerate(reward.scorers):
            if not isinstance(spec, ModelScorerSpec):
                continue
            # what is done with an output, and where it goes, needs no other process
            other = {"name", "weight", "gate", "timeout_s", "cache", "against", "missing_eos_penalty"}
            models = json.dumps(spec.model_dump(mode="json", exclude=other), sort_keys=True)
            if models not in known:
                known.add(models)
                found[f"reward.tasks.{task}.scorers.{number}"] = spec
    return found


def _models_of(key: str, spec: ModelScorerSpec, shape_of: ShapeOf) -> Iterator[Occupant]:
    """Yield the models of a scorer's process, in the order in which it loads them."""
    if isinstance(spec, RewardModelSpec):
        yield _transformers_model("reward model", spec.model, spec, shape_of, own_bytes=PROCESS_BYTES)
    elif isinstance(spec, RedteamSpec) and spec.victim_engine == "vllm":
        yield Occupant(who="CUDA context of the victim", peak_bytes=PROCESS_BYTES)
        yield _vllm_victim(key, spec, shape_of)
        yield _transformers_model("judge", spec.classifier, spec, shape_of, own_bytes=0)
    elif isinstance(spec, RedteamSpec):
        yield _transformers_model(
            "victim", spec.victim, spec, shape_of, own_bytes=PROCESS_BYTES, max_reply_tokens=spec.max_reply_tokens
        )
        yield _transformers_model("judge", spec.classifier, spec, shape_of, own_bytes=0)


def _transformers_model(
    what: str,
    path: str,
    spec: ModelScorerSpec,
    shape_of: ShapeOf,
    *,
    own_bytes: int,
    max_reply_tokens: int | None = None,
) -> Occupant:
    """Return a model of a scorer that transformers runs.

    Args:
        own_bytes: of its process.
        max_reply_tokens: of a victim, which has keys and values too; None: it only reads.
    """
    who = f"{what} {PurePath(path).name}"
    try:
        shape = shape_of(path)
    except ConfigError as error:
        return Occupant(who=who, peak_bytes=own_bytes, unknown=str(error))
    b = _dtype_bytes(spec)
    weights, work = b * shape.num_params, _activation_bytes(shape, spec.batch_tokens, dtype_bytes=b)
    if max_reply_tokens is not None:
        num_rows = spec.batch_tokens // (max_reply_tokens + 1)
        work += b * shape.kv_values_per_token * spec.batch_tokens
        work += SAMPLED_COPIES * F32 * num_rows * shape.vocab_size
    return Occupant(who=who, fixed_bytes=weights, peak_bytes=own_bytes + weights + work)


def _vllm_victim(key: str, spec: RedteamSpec, shape_of: ShapeOf) -> Occupant:
    """Return a victim in vLLM; without `max_attack_tokens` one attack is as long as its config allows, or a batch."""
    share_key = f"{key}.victim_vllm.gpu_memory_share"
    who, share = f"vLLM of the victim {PurePath(spec.victim).name}", spec.victim_vllm.gpu_memory_share
    try:
        shape = shape_of(spec.victim)
    except ConfigError as error:
        return Occupant(who=who, share=share, share_key=share_key, unknown=str(error))
    weights, per_token = (n * _dtype_bytes(spec) for n in (shape.num_params, shape.kv_values_per_token))
    config = shape.config or {}
    longest = config.get("max_position_embeddings") or config.get("n_positions") or spec.batch_tokens
    if spec.max_attack_tokens is not None:
        longest = TEMPLATE_TOKENS + spec.max_attack_tokens + spec.max_reply_tokens
    one, full = (per_token * num_tokens for num_tokens in (longest, max(longest, spec.batch_tokens)))
    return _vllm(who, spec.victim_vllm, share_key, weights, one, full)


def _vllm(who: str, section: VllmSection, share_key: str, weights: int, one_bytes: int, full_bytes: int) -> Occupant:
    """Return a vLLM engine.

    Args:
        weights: bytes of the model.
        one_bytes: keys and values of one sequence of full length, without which vLLM does not start.
        full_bytes: keys and values of all sequences that it may have at once, at full length.
    """
    own = section.kv_cache_bytes
    return Occupant(
        who=who,
        fixed_bytes=weights,
        peak_bytes=VLLM_BYTES + weights + (one_bytes if own is None else own),
        full_bytes=VLLM_BYTES + weights + full_bytes,
        share=section.gpu_memory_share,
        share_key=share_key,
        keeps_share=own is None,
    )


def _dtype_bytes(spec: ModelScorerSpec) -> int:
    # `auto` is the dtype of the files, which are not here: the largest
    return DTYPE_BYTES.get(spec.dtype, F32)


def _activation_bytes(shape: ModelShape, num_tokens: int, *, dtype_bytes: int) -> int:
    """Return what a forward pass without gradient holds at most: one layer as in training, which keeps more."""
    return num_tokens * layer_activation_bytes(shape, "float32" if dtype_bytes == F32 else "bfloat16")


def _trainer(recipe: Recipe, shape_of: ShapeOf) -> Iterator[Occupant]:
    num = recipe.trainer.num_processes
    who = "trainer" if num == 1 else f"trainer, one of {num}"
    try:
        shape = shape_of(recipe.model.path)
    except ConfigError as error:
        yield Occupant(who=who, peak_bytes=PROCESS_BYTES, unknown=str(error))
        return
    state, peak = trainer_state_bytes(recipe, shape), trainer_bytes(recipe, shape)
    yield Occupant(who=who, fixed_bytes=state, peak_bytes=PROCESS_BYTES + peak)


def _searcher(recipe: Recipe, shape_of: ShapeOf, rank: int) -> Iterator[Occupant]:
    """Yield the starting model, where a searcher holds it, and the engine; on the GPU of one rank of vLLM.

    Raises:
        ConfigError: the ranks cannot share the model (`check_tensor_parallel`).
    """
    section, num_ranks = recipe.searcher, recipe.searcher.tensor_parallel_size
    # the searcher's own process is on the first GPU, and every rank is a process too
    holds_start = recipe.searchers_hold_start and rank == 0
    if section.engine in NO_GPU_ENGINES and not holds_start:
        return
    own = "starting model of a searcher" if holds_start else "CUDA context of a searcher"
    engine = "vLLM of a searcher" if section.engine == "vllm" else f"{section.engine} engine of a searcher"
    if num_ranks > 1:
        engine = f"{engine}, one of {num_ranks} ranks"
    if section.engine not in ENGINES:
        yield Occupant(who=engine, peak_bytes=PROCESS_BYTES, unknown="it is an engine of your own")
        return
    try:
        shape = shape_of(recipe.model.path)
    except ConfigError as error:
        yield Occupant(who="CUDA context of a searcher", peak_bytes=PROCESS_BYTES)
        share = section.vllm.gpu_memory_share if section.engine == "vllm" else None  # it is taken whatever the model
        yield Occupant(who=engine, share=share, share_key=SHARE_KEY, unknown=str(error))
        return
    b = DTYPE_BYTES[recipe.model.dtype]
    weights, work = b * shape.num_params, 0
    if holds_start:
        work = weights + START_LOGITS_BYTES + _activation_bytes(shape, START_PASS_TOKENS, dtype_bytes=b)
    num_processes = 2 if num_ranks > 1 and rank == 0 else 1
    yield Occupant(who=own, fixed_bytes=weights if holds_start else 0, peak_bytes=num_processes * PROCESS_BYTES + work)
    if section.engine in NO_GPU_ENGINES:
        return
    if num_ranks > 1:
        check_tensor_parallel(shape.config or {}, num_ranks)
    # with fewer key-value heads than ranks, every rank has one
    kv_heads = math.ceil(shape.num_kv_heads / num_ranks)
    weights, kv_values = weights // num_ranks, shape.kv_values_per_token // shape.num_kv_heads * kv_heads
    value_bytes = 1 if section.engine == "vllm" and section.vllm.kv_cache_dtype != "auto" else b
    one = value_bytes * kv_values * (section.max_prompt_tokens + section.max_response_tokens)
    if section.engine == "embedded":
        yield Occupant(who=engine, fixed_bytes=weights, peak_bytes=weights + section.num_slots * one)
    else:
        yield _vllm(engine, section.vllm, SHARE_KEY, weights, one, section.num_slots * one)
