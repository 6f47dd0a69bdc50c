"""The parameters of a model by name: the trained ones, the published ones, and those that are sharded.

A model may have LoRA adapters (peft: a linear layer holds `base_layer` beside `lora_A` and `lora_B`), and it may be
sharded over the processes of a team (torch FSDP2, `fully_shard`: its parameters are DTensors). This module hides both:
published tensors are whole, have their names in Hugging Face format, and have the adapter added to its weight.

In a sharded model every decoder layer is a unit that is gathered for its own pass and dropped after it. The rest (the
embedding, the last norm and the output head, tied or not) belongs to the root: `run_as_forward` gathers it for as long
as a function runs, so the function can use the head's weight directly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

ADAPTER = "default"
"""Name of the LoRA adapter; peft requires one."""
_BASE_LAYER = ".base_layer."
_ADAPTER_PART = ".lora_"
_ROOT = "_tba_root"
"""Where a sharded model keeps its root: beside its submodules, not among them."""
Args = ParamSpec("Args")
Result = TypeVar("Result")


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
        yield name, weight.to(device="cpu", dtype=dtype or weight.dtype, copy=True).contiguous()


def is_adapted(module: Any) -> bool:
    """Return whether a module is a layer with a LoRA adapter of peft."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def has_adapter(model: Any) -> bool:
    """Return whether only a LoRA adapter of the model is trained."""
    return any(map(is_adapted, model.modules()))


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


class _Root(nn.Module):
    """The root of the model for FSDP: its forward pass is any function of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def is_sharded(model: nn.Module) -> bool:
    """Return whether every pass of the model is a collective."""
    return _ROOT in model.__dict__


def run_as_forward(
    model: nn.Module, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Run `function(*args)` as a forward pass of the model: a sharded model holds its whole root meanwhile."""
    root = model.__dict__.get(_ROOT)
    if root is None:
        return function(*args, **kwargs)
    result: Result = root(lambda: function(*args, **kwargs))
    if not _has_gradient(result):
        # without a backward pass nothing would drop the gathered root, and an update would leave it behind
        root.reshard()
    return result


def _has_gradient(value: object) -> bool:
    if isinstance(value, tuple):
        return any(_has_gradient(part) for part in value)
    return isinstance(value, Tensor) and value.requires_grad


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard a model in place. Process 0 has its weights and sends them; the others may hold it on the meta device."""
    # One unit after another goes to the mesh's device and to all processes: no device ever holds the whole model.
    device = _device_of(mesh)

    def from_leader(tensor: Tensor) -> Tensor:
        placed = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        dist.broadcast(placed, src=0)
        return placed

    _shard(model, mesh, lambda _name, tensor: from_leader(tensor))


def sharded_copy(model: Any, dtype: torch.dtype | None) -> Any:
    """Return a frozen copy of a sharded model in eval mode, without its adapter, sharded alike.

    No whole tensor exists on the way.

    Args:
        dtype: of the copy's parameters; None: as they are.
    """
    mesh: DeviceMesh = model.__dict__[_ROOT].mesh
    device = _device_of(mesh)
    config = copy.deepcopy(model.config)
    with torch.device("meta"):  # no memory until `_shard` places a unit
        copied = type(model)(config)
    copied.requires_grad_(False)
    copied.eval()
    buffers = dict(model.named_buffers())

    def empty(name: str, tensor: Tensor) -> Tensor:
        if name in buffers:
            return buffers[name].detach().clone()
        return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)

    _shard(copied, mesh, empty)
    sources = plain_parameters(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(sources[name])
    return copied


def _shard(model: Any, mesh: DeviceMesh, place: Callable[[str, Tensor], Tensor]) -> None:
    """Shard unit by unit; `place` returns the new tensor for one of the model's, by name."""
    names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    done: set[int] = set()
    units = [*_layers(model), model]
    root: Any = _Root(model)
    # Layers first: what they own is done when the model itself, the last unit, takes the rest.
    for unit in units:
        placed: dict[int, Tensor] = {}  # by identity: tied tensors stay one
        for module in unit.modules():
            if id(module) in done:
                continue
            done.add(id(module))
            for leaf, tensor in _own_tensors(module):
                if id(tensor) not in placed:
                    new = place(names[id(module)] + leaf, tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    placed[id(tensor)] = new
                _replace(module, leaf, placed[id(tensor)])
        target = root if unit is model else unit
        fully_shard(target, mesh=mesh)
        # sum the gradients, do not average them: each process's loss is already its share of the whole batch
        target.set_gradient_divide_factor(1.0)
        target.set_force_sum_reduction_for_comms(True)
    root.mesh = mesh
    model.__dict__[_ROOT] = root  # not as a submodule: the root holds the model


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from [(leaf, tensor) for leaf, tensor in tensors.items() if tensor is not None]


def _replace(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor  # pyright: ignore


def _layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers: the classes that a Hugging Face model says must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
