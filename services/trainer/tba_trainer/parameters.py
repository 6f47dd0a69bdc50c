"""The parameters of a model by name: those that are trained, and those that are published.

A model may be sharded over processes (torch FSDP2: its parameters are DTensors) and may carry LoRA adapters (peft: a
linear layer holds `base_layer` beside `lora_A` and `lora_B`). Nobody but this module needs to know: published are whole
tensors under the names that the model has in Hugging Face format, with the adapter added to the weight it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

ADAPTER = "default"
"""Name of the LoRA adapter, which only peft asks for."""
_BASE_LAYER = ".base_layer."
_ADAPTER_PART = ".lora_"


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """What the optimizer moves, by `named_parameters` name: everything, or with LoRA the adapter alone."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard (a collective: every process calls it, in the same order); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, which every process has, into `target`, converting the dtype; a shard takes its part."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    placed = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(placed.to_local())


def whole_tensors(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors as copies on the CPU, gathered one at a time.

    Every process of a sharded model must exhaust the iterator, in step with the others.
    """
    for name, parameter in parameters.items():
        yield name, full(parameter.detach()).to("cpu", copy=True).contiguous()


def plain_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that the model has without its adapter, by the names that it has in Hugging Face format."""
    adapted = _adapted_layers(model)
    plain = {}
    for name, parameter in model.named_parameters():
        layer, is_base, leaf = name.rpartition(_BASE_LAYER)
        if is_base and layer in adapted:
            plain[f"{layer}.{leaf}"] = parameter
        elif name.partition(_ADAPTER_PART)[0] not in adapted:
            plain[name] = parameter
    return plain


@torch.no_grad()
def published_tensors(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as they are published: gathered and merged one at a time, as copies on the CPU.

    Every process of a sharded model must exhaust the iterator, in step with the others.

    Args:
        dtype: what the sum of weight and adapter is rounded to, once; None: the parameter's own.

    Yields:
        Hugging Face parameter name and tensor; a tied output head appears once.
    """
    adapted = _adapted_layers(model)
    for name, parameter in plain_parameters(model).items():
        weight = full(parameter.detach())
        layer, _, leaf = name.rpartition(".")
        if layer in adapted and leaf == "weight":
            weight = weight + full(adapted[layer].get_delta_weight(ADAPTER)).to(weight.dtype)
        yield name, weight.to(device="cpu", dtype=dtype or weight.dtype, copy=True).contiguous()


def is_adapted(module: Any) -> bool:
    """Whether it is a layer that peft has put a LoRA adapter on."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def has_adapter(model: Any) -> bool:
    """Whether LoRA is all that is trained of it."""
    return any(map(is_adapted, model.modules()))


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_adapted(module)}
