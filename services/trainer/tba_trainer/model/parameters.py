"""The parameters of a model by name: the trained ones, the published ones, and those that are sharded.

A model may have LoRA adapters (peft: a linear layer holds `base_layer` beside `lora_A` and `lora_B`), and it may be
sharded over the processes of a team (sharding.py: its parameters are DTensors). This module hides both: published
tensors are whole, have their names in Hugging Face format, and have the adapter added to its weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

ADAPTER = "default"
"""Name of the LoRA adapter; peft requires one."""
_BASE_LAYER = ".base_layer."
_ADAPTER_PART = ".lora_"


def trainable(model: Any) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their `named_parameters` name: all, or with LoRA the adapter's."""
    # a tied head is in `named_parameters` once: it gets one gradient, one moment and one tensor in a checkpoint
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard (a collective, called by all processes in order), or any other tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, which every process has, into `target` and convert the dtype; a shard takes its part."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    # every process has the whole tensor: each cuts its own part out, and nothing is sent
    placed = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(placed.to_local())


def whole_tensors(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors as copies on the CPU, gathered one at a time.

    Every process of a sharded model must exhaust the iterator, in step with the others.
    """
    for name, parameter in parameters.items():
        yield name, full(parameter.detach()).to("cpu", copy=True).contiguous()


def plain_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters without the adapter, by their names in Hugging Face format."""
    adapted = _adapted_layers(model)
    plain = {}
    for name, parameter in model.named_parameters():
        # peft has put `base_layer` between the names of an adapted layer and of its weight
        layer, is_base, leaf = name.rpartition(_BASE_LAYER)
        if is_base and layer in adapted:
            plain[f"{layer}.{leaf}"] = parameter
        elif name.partition(_ADAPTER_PART)[0] not in adapted:
            plain[name] = parameter
    return plain


@torch.no_grad()
def published_tensors(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights for publishing: gathered and merged one at a time, as copies on the CPU.

    Every process of a sharded model must exhaust the iterator, in step with the others.

    Args:
        dtype: of the result; the sum of weight and adapter is rounded once. None: the parameter's own.

    Yields:
        Hugging Face parameter name and tensor; a tied output head appears once.
    """
    adapted = _adapted_layers(model)
    for name, parameter in plain_parameters(model).items():
        weight = full(parameter.detach())
        layer, _, leaf = name.rpartition(".")
        if layer in adapted and leaf == "weight":
            # merged in the weight's dtype (float32 master weights), so the cast below is the only rounding
            weight = weight + full(adapted[layer].get_delta_weight(ADAPTER)).to(weight.dtype)
        # pinned memory, which torch keeps for the next snapshot, takes a GPU's tensor many times faster than new pages
        host = torch.empty(weight.shape, dtype=dtype or weight.dtype, pin_memory=weight.is_cuda)
        yield name, host.copy_(weight)


def is_adapted(module: Any) -> bool:
    """Return whether a module is a layer with a LoRA adapter of peft."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def has_adapter(model: Any) -> bool:
    """Return whether only a LoRA adapter of the model is trained."""
    return any(map(is_adapted, model.modules()))


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_adapted(module)}
