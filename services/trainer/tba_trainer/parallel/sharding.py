"""A model sharded over the processes of a team with torch FSDP2 (`fully_shard`).

Every decoder layer is a unit that is gathered for its own pass and dropped after it. What is left, the embedding, the
last norm and the output head, tied or not, belongs to the root: it is gathered while a function runs `inside` the
model, so that the head's weight can be used directly. Gradients are summed over the processes, not averaged: the loss
of each is already its share of the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tba_trainer.parameters import plain_parameters

P = ParamSpec("P")
R = TypeVar("R")
_ROOT = "_tba_root"


class _Root(nn.Module):
    """What FSDP takes for the root of the model: its forward pass is any function of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def is_sharded(model: nn.Module) -> bool:
    """Whether every pass of the model is a collective."""
    return _ROOT in model.__dict__


def inside(model: nn.Module, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args)` as a forward pass of the model: a sharded one holds the whole root while it runs."""
    root = model.__dict__.get(_ROOT)
    if root is None:
        return function(*args, **kwargs)
    result: R = root(lambda: function(*args, **kwargs))
    if not _has_gradient(result):
        # without a backward pass nothing would drop the gathered root, and an update would leave it behind
        root.reshard()
    return result


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard a model in place. Process 0 has its weights; the others may hold it on the meta device. All get them.

    One unit after another goes to the mesh's device and is sent to all, so that no device ever holds the whole model.
    """
    device = _device_of(mesh)

    def from_leader(tensor: Tensor) -> Tensor:
        placed = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        dist.broadcast(placed, src=0)
        return placed

    _shard(model, mesh, lambda _name, tensor: from_leader(tensor))


def sharded_copy(model: Any, dtype: torch.dtype | None) -> Any:
    """A frozen copy of a sharded model in eval mode, without its adapter, sharded alike; no whole tensor exists on the
    way.

    Args:
        dtype: of the copy's parameters; None: as they are.
    """
    mesh: DeviceMesh = model.__dict__[_ROOT].mesh
    device = _device_of(mesh)
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        twin = type(model)(config)
    twin.requires_grad_(False)
    twin.eval()
    buffers = dict(model.named_buffers())

    def empty(name: str, tensor: Tensor) -> Tensor:
        if name in buffers:
            return buffers[name].detach().clone()
        return torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype)

    _shard(twin, mesh, empty)
    sources = plain_parameters(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(sources[name])
    return twin


def _shard(model: Any, mesh: DeviceMesh, place: Callable[[str, Tensor], Tensor]) -> None:
    """Shard unit by unit; `place` gives the tensor that stands for one of the model's, by name."""
    names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    done: set[int] = set()
    units = [*_layers(model), model]
    root: Any = _Root(model)
    for unit in units:
        placed: dict[int, Tensor] = {}  # tied tensors stay one
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
    """The decoder layers, by the class names that Hugging Face models say must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


__all__ = ["FSDPModule", "inside", "is_sharded", "shard", "sharded_copy"]
