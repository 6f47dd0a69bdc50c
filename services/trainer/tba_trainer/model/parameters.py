"""Access to a model's parameters by name: to train, to publish, to load and to gather shards.

A model may have LoRA adapters (peft: a linear layer holds `base_layer` beside `lora_A` and `lora_B`), and it may be
sharded over the processes of a team (sharding.py: its parameters are DTensors). This module hides both: published
tensors are whole, have Hugging Face names, and include the adapter.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tba.errors import ConfigError
from tba.weights.adapter import A_SUFFIX, B_SUFFIX, PEFT_PREFIX, exact_bits
from tba_trainer.model.host_memory import HostMemoryError, host_copy
from tba_trainer.model.slices import TensorSlice

ADAPTER = "default"
"""Name of the LoRA adapter; peft requires one."""
_BASE_LAYER = ".base_layer."
_ADAPTER_PART = ".lora_"


def trainable(model: Any) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their `named_parameters` name: all, or with LoRA only the adapter's."""
    # a tied head is in `named_parameters` once: it gets one gradient, one moment and one tensor in a checkpoint
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors without gradient; a shard stays a shard."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
@torch.no_grad()
def exchanged(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Set parameters to the values of `tensors` while the context is open, then restore their own bit for bit."""
    kept = copied(parameters)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
    try:
        yield
    finally:  # also after an error
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])


def full(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a whole (a collective: all processes call it in the same order), others unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor | TensorSlice) -> None:
    """Copy `whole` into `target` in place, and convert the dtype. Nothing is sent between processes.

    A sharded target takes its part of a whole tensor. A `TensorSlice` must have the rows of this process's shard.
    """
    if isinstance(whole, TensorSlice):
        local = target.to_local() if isinstance(target, DTensor) else target
        if local.shape != whole.tensor.shape:
            raise ValueError(f"rows of shape {list(whole.tensor.shape)} for a shard of shape {list(local.shape)}")
        local.copy_(whole.tensor)
        return
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    # every process has the whole tensor: each cuts its own part out, and nothing is sent
    placed = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(placed.to_local())


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
def published_tensors(
    model: Any, dtype: torch.dtype | None = None, *, on_host: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights to publish, one at a time: gathered, merged with the adapter and copied to the CPU.

    Every process of a sharded model must exhaust the iterator, in step with the others.

    Args:
        dtype: dtype of the result; the sum of weight and adapter is rounded once. None: the parameter's own.
        on_host: names of the tensors to copy to the CPU. The others stay on their device, and are valid until the next
            one is yielded. None: all are copied.

    Yields:
        Hugging Face parameter name and tensor; a tied output head appears once.

    Raises:
        HostMemoryError: there was no memory for a copy; raised after the last tensor, for which other processes wait.
    """
    adapted, no_memory = _adapted_layers(model), None
    for name, parameter in plain_parameters(model).items():
        weight = full(parameter.detach())
        layer, _, leaf = name.rpartition(".")
        if layer in adapted and leaf == "weight":
            # merged in the weight's dtype (float32 master weights), so the cast below is the only rounding
            weight = weight + full(adapted[layer].get_delta_weight(ADAPTER)).to(weight.dtype)
        if on_host is not None and name not in on_host:
            yield name, weight.to(dtype or weight.dtype)
            continue
        try:
            copy = host_copy(weight, dtype)
        except HostMemoryError as error:  # raised once all are gathered: the other processes gather them, too
            no_memory = no_memory or error
            continue
        yield name, copy
    if no_memory is not None:
        raise no_memory


@torch.no_grad()
def adapter_tensors(model: Any, merged: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the adapter, gathered one layer at a time, as copies on the CPU in float32.

    Every process of a sharded model must exhaust the iterator, in step with the others.

    Args:
        merged: a copy of the model's plain parameters in the published dtype, sharded alike. Changed in place: an
            adapted weight becomes the sum of the published weight and the adapter.

    Yields:
        Names as peft writes them to a file, and A [rank, in] and B [out, rank] of each layer.
    """
    for name, layer in _adapted_layers(model).items():
        a, b = (full(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
        num_bits = exact_bits(len(a))
        left, right = _on_grid(b.double() * layer.scaling[ADAPTER], num_bits), _on_grid(a.double(), num_bits)
        if layer.fan_in_fan_out:
            left, right = right.T, left.T
        # the weight is first rounded to the published dtype: all as published
        target, weight = merged[f"{name}.weight"], layer.base_layer.weight.detach()
        if isinstance(target, DTensor) and isinstance(weight, DTensor):
            # rows are sharded: every process adds the product of its own
            left = distribute_tensor(
                left.to(target.device).contiguous(), target.device_mesh, target.placements, src_data_rank=None
            ).to_local()
            right, target, weight = right.to(target.device), target.to_local(), weight.to_local()
        target.copy_((weight.to(target.dtype).double() + left @ right).float())
        yield f"{PEFT_PREFIX}{name}{A_SUFFIX}", a.to("cpu", torch.float32, copy=True).contiguous()
        yield f"{PEFT_PREFIX}{name}{B_SUFFIX}", b.to("cpu", torch.float32, copy=True).contiguous()


def _on_grid(matrix: Tensor, num_bits: int) -> Tensor:
    """Round A or B to `num_bits` as `tba.weights.adapter` does, so that both modules compute the same bits of B A."""
    unit = 2.0 ** (int(torch.frexp(matrix.abs().max())[1]) - num_bits)
    return torch.round(matrix / unit) * unit


def has_transposed_weights(model: Any) -> bool:
    """Return whether the adapted weights are stored as [in, out], as GPT-2 does, and not as [out, in]."""
    found = {bool(layer.fan_in_fan_out) for layer in _adapted_layers(model).values()}
    if len(found) > 1:
        raise ConfigError(
            "model.lora adapts weights of both orders, [in, out] and [out, in], which one adapter cannot hold; "
            "name layers of one order in model.lora.target_modules"
        )
    return found == {True}


def is_adapted(module: Any) -> bool:
    """Return whether a module is a layer with a LoRA adapter of peft."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def has_adapter(model: Any) -> bool:
    """Return whether only a LoRA adapter of the model is trained."""
    return any(map(is_adapted, model.modules()))


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_adapted(module)}
