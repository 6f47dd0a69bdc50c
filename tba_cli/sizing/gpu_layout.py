"""Lay the models of a run out on its GPUs, in the order in which they are loaded, and check that they fit.

    reward models and judges -> trainer -> searchers: the starting model, then the engine

vLLM takes `gpu_memory_share` of the *total* memory of a GPU, and does not start where less is *free* at that moment
(`request_memory` in vllm/v1/worker/utils.py). It measures the free memory after whatever the same process has loaded
before, so that the starting model is outside its share.

Shares are certain, and the trainer's peak is traced. Activations and caches of the others are estimates. Every occupant
counts with its peak, so a layout that fits at the first start also fits when a process is started again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tba.config import Recipe
from tba.config.reward import ModelScorerSpec, RedteamSpec, RewardModelSpec
from tba.config.searcher import ENGINES, check_tensor_parallel
from tba.errors import ConfigError
from tba_cli.sizing.estimate import DTYPE_BYTES, F32
from tba_cli.sizing.model_shape import ModelShape

GIB = 2**30
CARD_GIB = 79.0
"""Memory of an 80 GB card in GiB: its driver and torch count a little more than 79 GiB."""
PROCESS_BYTES = 1 * GIB
"""CUDA's context, kernels and NCCL, for each process on a GPU: measured 0.74 GiB on an H200 without NCCL."""
USABLE_SHARE = 0.9
"""Share of its memory that a trainer may fill; fragmentation and temporary memory of ops take the rest."""
VLLM_BYTES = 2 * GIB
"""Activations, CUDA graphs and work space within vLLM's share: assumed, not measured (1 to 2 GiB)."""
START_PASS_TOKENS = 4096
"""Most tokens in one forward pass of a searcher's starting model (`reference_logprobs.PASS_TOKENS`)."""
START_LOGITS_BYTES = 128 * 2**20
"""Size of the chunks of logits of a searcher's starting model (`reference_logprobs.LOGITS_BYTES`)."""
NO_GPU_ENGINES = ("simulated", "openai")
"""Engines without a model on a GPU; their searcher may still hold the starting model on one."""
ShapeOf = Callable[[str], ModelShape]
"""Function that returns the shape of the model at a path of the recipe, or raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A model or process on a GPU."""

    who: str
    peak_bytes: int
    """The most memory that it holds; for vLLM the least that it needs, with a cache for one rollout."""
    share: float | None = None
    """Share of the GPU's total memory that vLLM takes; None for others."""

    def bytes_on(self, total_bytes: int) -> int:
        """Return the bytes that it takes on a GPU with this much memory."""
        return max(self.peak_bytes, math.ceil((self.share or 0.0) * total_bytes))


Layout = Mapping[int, tuple[Occupant, ...]]
"""For each GPU, by its number, the occupants in the order in which they start."""


def gpu_layout(recipe: Recipe, shape_of: ShapeOf, *, trainer_peak_bytes: int) -> Layout:
    """Return the occupants of each GPU, in the order in which they start; empty if the recipe asks for no GPU."""
    # scorers with the same models share a process, the first one's
    scorers: dict[str, ModelScorerSpec] = {}
    for task, reward in recipe.reward.tasks.items():
        for number, spec in enumerate(reward.scorers):
            known = {one.models_key for one in scorers.values()}
            if isinstance(spec, ModelScorerSpec) and spec.models_key not in known:
                scorers[f"reward.tasks.{task}.scorers.{number}"] = spec
    devices = [recipe.trainer.device, recipe.searcher.device, *(spec.device for spec in scorers.values())]
    # a scorer's `auto` alone asks for none
    if not any(device.startswith("cuda") for device in devices) and not named_gpus(recipe):
        return {}
    gpus = recipe.local.gpus
    found: dict[int, list[Occupant]] = {}

    def put(key: str, device: str, visible: Sequence[int] | None, own: Iterator[Occupant]) -> None:
        number = _number(key, device, visible)
        if number is not None:
            found.setdefault(number, []).extend(own)

    for key, spec in scorers.items():
        put(f"{key}.device", spec.device, gpus.reward, _models_of(spec, shape_of))
    num, device = recipe.trainer.num_processes, recipe.trainer.device
    who = "trainer" if num == 1 else f"trainer, one of {num}"
    trainer = Occupant(who, math.ceil(trainer_peak_bytes / USABLE_SHARE))
    for rank in range(num):
        put("trainer.device", f"{device}:{rank}" if num > 1 else device, gpus.trainer, iter([trainer]))
    num_ranks, device = recipe.searcher.tensor_parallel_size, recipe.searcher.device
    for index in range(recipe.searcher.num_searchers):
        visible = None if gpus.searchers is None else gpus.searchers[index % len(gpus.searchers)]
        for rank in range(num_ranks):
            own = f"{device}:{rank}" if num_ranks > 1 and device == "cuda" else device
            put("searcher.device", own, visible, _searcher(recipe, shape_of, rank))
    return {number: tuple(occupants) for number, occupants in sorted(found.items()) if occupants}


def named_gpus(recipe: Recipe) -> set[int]:
    """Return the numbers of the GPUs in `[local.gpus]`."""
    gpus = recipe.local.gpus
    return {*(gpus.reward or ()), *(gpus.trainer or ()), *(number for own in gpus.searchers or () for number in own)}


def _number(key: str, device: str, visible: Sequence[int] | None) -> int | None:
    """Return the number of the GPU that a device names, or None if it is not a GPU.

    Args:
        key: the recipe key of the device, for the error.
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


def _models_of(spec: ModelScorerSpec, shape_of: ShapeOf) -> Iterator[Occupant]:
    """Yield the models of a scorer's process, in the order in which it loads them."""
    yield Occupant("CUDA context of a scorer", PROCESS_BYTES)
    models: dict[str, str] = {}
    if isinstance(spec, RewardModelSpec):
        models = {"reward model": spec.model}
    elif isinstance(spec, RedteamSpec):
        models = {"victim": spec.victim, "judge": spec.classifier}
    b = DTYPE_BYTES.get(spec.dtype, F32)  # `auto` is the dtype of the files: the largest
    for what, path in models.items():
        shape = shape_of(path)
        num_bytes = b * shape.num_params + _pass_bytes(shape, spec.batch_tokens, b)
        if what == "victim":  # it writes, so it has keys and values too
            num_bytes += b * shape.kv_values_per_token * spec.batch_tokens
        yield Occupant(f"{what} {PurePath(path).name}", num_bytes)


def _pass_bytes(shape: ModelShape, num_tokens: int, dtype_bytes: int) -> int:
    """Return the peak bytes of a forward pass without gradients: the residual stream and the inside of one layer."""
    return num_tokens * dtype_bytes * (8 * shape.hidden_size + 3 * shape.inner_size)


def _searcher(recipe: Recipe, shape_of: ShapeOf, rank: int) -> Iterator[Occupant]:
    """Yield a searcher's occupants on the GPU of one vLLM rank: CUDA context or starting model, then the engine."""
    section, num_ranks = recipe.searcher, recipe.searcher.tensor_parallel_size
    # the searcher's own process is on the first GPU, and every rank is a process too
    holds_start = recipe.searchers_hold_start and rank == 0
    if section.engine in NO_GPU_ENGINES and not holds_start:
        return
    if section.engine not in ENGINES:
        raise ConfigError(f"the memory of searcher.engine {section.engine!r} is not known: it is an engine of your own")
    shape, b = shape_of(recipe.model.path), DTYPE_BYTES[recipe.model.dtype]
    weights = b * shape.num_params
    processes = (2 if num_ranks > 1 and rank == 0 else 1) * PROCESS_BYTES
    if holds_start:
        work = START_LOGITS_BYTES + _pass_bytes(shape, START_PASS_TOKENS, b)
        yield Occupant("starting model of a searcher", processes + weights + work)
    else:
        yield Occupant("CUDA context of a searcher", processes)
    if section.engine in NO_GPU_ENGINES:
        return
    if num_ranks > 1:
        check_tensor_parallel(shape.config, num_ranks)
    # with fewer key-value heads than ranks, every rank has one
    kv_heads = math.ceil(shape.num_kv_heads / num_ranks)
    weights, kv_values = weights // num_ranks, shape.kv_values_per_token // shape.num_kv_heads * kv_heads
    one = b * kv_values * (section.max_prompt_tokens + section.max_response_tokens)
    if section.engine == "embedded":
        yield Occupant("embedded engine of a searcher", weights + section.num_slots * one)
        return
    who = "vLLM of a searcher" if num_ranks == 1 else f"vLLM of a searcher, one of {num_ranks} ranks"
    yield Occupant(who, VLLM_BYTES + weights + one, section.vllm.gpu_memory_share)


def misfits(layout: Layout, gpu_bytes: int) -> Iterator[str]:
    """Yield a sentence for each group of GPUs whose occupants need more memory than a GPU has."""
    for occupants, numbers in _alike(layout).items():
        if (need := sum(one.bytes_on(gpu_bytes) for one in occupants)) > gpu_bytes:
            yield (
                f"GPU {_numbers(numbers)}: {' and '.join(one.who for one in occupants)} need {_gib(need)} of "
                f"{_gib(gpu_bytes)} GiB; lower searcher.vllm.gpu_memory_share or trainer.micro_batch_tokens, set "
                "trainer.gradient_checkpointing, raise trainer.num_processes, train an adapter ([model.lora]), or use "
                "more GPUs (local.gpus)"
            )


def layout_lines(layout: Layout, gpu_bytes: int) -> Iterator[str]:
    """Yield the layout as a table; GPUs with the same occupants share its lines."""
    yield f"  {'GPU':<10} {'in the order of start':<48} {'GiB':>6} {'share':>6} {'left':>6}"
    for occupants, numbers in _alike(layout).items():
        name, free = _numbers(numbers), gpu_bytes
        for one in occupants:
            need = one.bytes_on(gpu_bytes)
            free -= need
            share = "" if one.share is None else f"{one.share:g}"
            yield f"  {name:<10} {one.who:<48} {_gib(need):>6} {share:>6} {_gib(free):>6}"
            name = ""


def _alike(layout: Layout) -> dict[tuple[Occupant, ...], list[int]]:
    found: dict[tuple[Occupant, ...], list[int]] = {}
    for number, occupants in layout.items():
        found.setdefault(occupants, []).append(number)
    return found


def _numbers(numbers: Sequence[int]) -> str:
    """Return the numbers of GPUs, in rising order, as `0 to 3` or `1, 3`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"
