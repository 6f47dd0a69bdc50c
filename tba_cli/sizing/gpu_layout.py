"""Lay the models of a run out on its GPUs, in the order in which they are loaded.

    reward models and judges -> trainer -> searchers: the starting model, then the engine

vLLM takes `gpu_memory_share` of the *total* memory of a GPU, and does not start where less is *free* at that moment
(`request_memory` in vllm/v1/worker/utils.py). It measures the free memory after whatever the same process has loaded
before, so that the starting model is outside its share.

Shares and weights are certain, and the trainer's peak is traced. Activations and caches of the others are estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from tba.config import Recipe
from tba.config.reward import ModelScorerSpec, RedteamSpec, RewardModelSpec
from tba.config.searcher import ENGINES, check_tensor_parallel
from tba.errors import ConfigError
from tba_cli.sizing.estimate import DTYPE_BYTES, F32, trainer_state_bytes
from tba_cli.sizing.model_shape import ModelShape

GIB = 2**30
PROCESS_BYTES = 1 * GIB
"""CUDA's context, kernels and NCCL, for each process on a GPU: measured 0.74 GiB on an H200 without NCCL."""
USABLE_SHARE = 0.9
"""A trainer may fill this much of its memory: fragments and what happens inside of ops have the rest."""
VLLM_BYTES = 2 * GIB
"""Activations, CUDA graphs and work space within vLLM's share: assumed, not measured (1 to 2 GiB)."""
START_PASS_TOKENS = 4096
"""The starting model of a searcher reads this many tokens at once (`PASS_TOKENS` there)."""
START_LOGITS_BYTES = 128 * 2**20
"""It works on logits in chunks of this (`LOGITS_BYTES` there)."""
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
    """The most that it holds; of vLLM: the least that it needs, with room for one rollout."""
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

    def bytes_on(self, total_bytes: int, *, certain: bool = False) -> int:
        """Return what it takes of a GPU with this much memory; `certain`: the share or the weights alone."""
        if self.share is None:
            return self.fixed_bytes if certain else self.peak_bytes
        share_bytes = math.ceil(self.share * total_bytes)
        return share_bytes if certain else max(share_bytes, self.peak_bytes)


Layout = Mapping[int, tuple[Occupant, ...]]
"""Number of the GPU -> who is on it, in the order of start."""


def gpu_layout(
    recipe: Recipe,
    shape_of: ShapeOf,
    *,
    services: Collection[str] = SERVICES,
    is_container: bool = False,
    trainer_peak_bytes: int = 0,
) -> Layout:
    """Return who is on which GPU, in the order of start; empty where the recipe asks for no GPU.

    Args:
        services: those that are counted.
        is_container: each of them has a container of its own, with its own GPUs: `[local.gpus]` is not read, and a
            searcher is alone.
        trainer_peak_bytes: of each process, as traced; 0: it was not traced, and what it holds for certain counts.

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
            found.setdefault(number, []).extend(replace(one, service=service) for one in own)

    if "reward" in services:
        for key, spec in _model_processes(recipe).items():
            put("reward", f"{key}.device", spec.device, gpus.reward, _models_of(spec, shape_of))
    if "trainer" in services:
        num, device = recipe.trainer.num_processes, recipe.trainer.device
        for rank in range(num):
            own = f"{device}:{rank}" if num > 1 else device
            put("trainer", "trainer.device", own, gpus.trainer, _trainer(recipe, shape_of, trainer_peak_bytes))
    if "searcher" in services:
        for index in range(1 if is_container else recipe.searcher.num_searchers):
            visible = None if gpus.searchers is None else gpus.searchers[index % len(gpus.searchers)]
            num_ranks, device = recipe.searcher.tensor_parallel_size, recipe.searcher.device
            for rank in range(num_ranks):
                own = f"{device}:{rank}" if num_ranks > 1 and device == "cuda" else device
                put("searcher", "searcher.device", own, visible, _searcher(recipe, shape_of, rank))
    return {number: tuple(occupants) for number, occupants in sorted(found.items()) if occupants}


def unknown_sizes(layout: Layout) -> dict[str, str]:
    """Return the models whose sizes are not known, with the reason; they are counted as nothing but vLLM's share."""
    return {one.who: one.unknown for occupants in layout.values() for one in occupants if one.unknown}


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


def _models_of(spec: ModelScorerSpec, shape_of: ShapeOf) -> Iterator[Occupant]:
    """Yield the models of a scorer's process, in the order in which it loads them."""
    yield Occupant(who="CUDA context of a scorer", peak_bytes=PROCESS_BYTES)
    if isinstance(spec, RewardModelSpec):
        yield _reader("reward model", spec.model, spec, shape_of)
    elif isinstance(spec, RedteamSpec):
        yield _reader("victim", spec.victim, spec, shape_of, writes=True)
        yield _reader("judge", spec.classifier, spec, shape_of)


def _reader(what: str, path: str, spec: ModelScorerSpec, shape_of: ShapeOf, *, writes: bool = False) -> Occupant:
    """Return a model of a scorer that transformers runs; one that `writes` has keys and values too."""
    who = f"{what} {PurePath(path).name}"
    try:
        shape = shape_of(path)
    except ConfigError as error:
        return Occupant(who=who, unknown=str(error))
    b = DTYPE_BYTES.get(spec.dtype, F32)  # `auto` is the dtype of the files, which are not here: the largest
    weights, work = b * shape.num_params, _pass_bytes(shape, spec.batch_tokens, b)
    if writes:
        work += b * shape.kv_values_per_token * spec.batch_tokens
    return Occupant(who=who, fixed_bytes=weights, peak_bytes=weights + work)


def _pass_bytes(shape: ModelShape, num_tokens: int, dtype_bytes: int) -> int:
    """Return what a forward pass without gradient holds at most: the residual stream and the inside of one layer."""
    return num_tokens * dtype_bytes * (8 * shape.hidden_size + 3 * shape.inner_size)


def _trainer(recipe: Recipe, shape_of: ShapeOf, peak_bytes: int) -> Iterator[Occupant]:
    num = recipe.trainer.num_processes
    who = "trainer" if num == 1 else f"trainer, one of {num}"
    try:
        state = trainer_state_bytes(recipe, shape_of(recipe.model.path))
    except ConfigError as error:
        yield Occupant(who=who, peak_bytes=PROCESS_BYTES, unknown=str(error))
        return
    yield Occupant(who=who, fixed_bytes=state, peak_bytes=math.ceil(peak_bytes / USABLE_SHARE) or state + PROCESS_BYTES)


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
    share = section.vllm.gpu_memory_share if section.engine == "vllm" else None  # it is taken whatever the model
    try:
        shape = shape_of(recipe.model.path)
    except ConfigError as error:
        yield Occupant(who="CUDA context of a searcher", peak_bytes=PROCESS_BYTES)
        yield Occupant(who=engine, share=share, share_key=SHARE_KEY, unknown=str(error))
        return
    b = DTYPE_BYTES[recipe.model.dtype]
    weights, work = b * shape.num_params, 0
    if holds_start:
        work = weights + START_LOGITS_BYTES + _pass_bytes(shape, START_PASS_TOKENS, b)
    num_processes = 2 if num_ranks > 1 and rank == 0 else 1
    yield Occupant(who=own, fixed_bytes=weights if holds_start else 0, peak_bytes=num_processes * PROCESS_BYTES + work)
    if section.engine in NO_GPU_ENGINES:
        return
    if num_ranks > 1:
        check_tensor_parallel(shape.config, num_ranks)
    # with fewer key-value heads than ranks, every rank has one
    kv_heads = math.ceil(shape.num_kv_heads / num_ranks)
    weights, kv_values = weights // num_ranks, shape.kv_values_per_token // shape.num_kv_heads * kv_heads
    value_bytes = 1 if section.engine == "vllm" and section.vllm.kv_cache_dtype != "auto" else b
    one = value_bytes * kv_values * (section.max_prompt_tokens + section.max_response_tokens)
    if section.engine == "embedded":
        yield Occupant(who=engine, fixed_bytes=weights, peak_bytes=weights + section.num_slots * one)
        return
    cache = section.vllm.kv_cache_bytes
    yield Occupant(
        who=engine,
        fixed_bytes=weights,
        peak_bytes=VLLM_BYTES + weights + (one if cache is None else cache),
        share=share,
        share_key=SHARE_KEY,
        keeps_share=cache is None,
    )
