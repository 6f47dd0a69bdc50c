"""A model that is sharded over the processes of a team, by torch FSDP2 (`fully_shard`).

Every decoder layer is an FSDP unit: its weights are gathered for its own pass and freed after it. The rest (the
embedding, the last norm and the output head, tied or not) belongs to the root unit. `run_as_forward` gathers the root
for as long as a function runs, so the function can use the head's weight directly.

With `trainer.compute_dtype = "bfloat16"` the units are gathered in 16 bits and their gradients summed in float32; the
shards, which the optimizer updates, are float32. A pass runs under autocast, as in one process. The embedding's output
is cast to float32, so that the residual stream is float32. docs/adr/0030-sharded-mixed-precision.md says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tba_trainer.model.context import Context, context_of, set_context
from tba_trainer.model.parameters import plain_parameters

_ROOT = "_tba_root"
"""Key of a sharded model's `__dict__` under which its root is kept; the root is not a submodule of the model."""
Args = ParamSpec("Args")
Result = TypeVar("Result")


class _Root(nn.Module):
    """The root unit of a sharded model. FSDP gathers its weights while `forward` calls the given function."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh
        self.dtype = dtype
        """dtype in which weights are gathered; None: their own."""
        self.units: list[FSDPModule] = []
        """The decoder layers, then the root itself."""

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _root_of(model: nn.Module) -> Any:
    return model.__dict__.get(_ROOT)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model is sharded: then every pass is a collective."""
    return _root_of(model) is not None


def rounds_weights(model: nn.Module) -> bool:
    """Return whether passes use the weights in another dtype than the one they are stored in."""
    root = _root_of(model)
    return root is not None and root.dtype is not None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters, on which passes run."""
    return next(model.parameters()).device


def run_as_forward(
    model: nn.Module, function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Return a function's result; while it runs, a sharded model's root weights are gathered (then a collective)."""
    root = _root_of(model)
    if root is None:
        return function(*args, **kwargs)
    result: Result = root(lambda: function(*args, **kwargs))
    if not _has_gradient(result):
        # without a backward pass nothing would drop what is still gathered, and an update would leave it behind
        for unit in root.units:
            unit.reshard()
    return result


def _has_gradient(value: object) -> bool:
    if isinstance(value, tuple):
        return any(_has_gradient(part) for part in value)
    return isinstance(value, Tensor) and value.requires_grad


def shard(
    model: Any,
    mesh: DeviceMesh,
    *,
    compute_dtype: Literal["float32", "bfloat16"] = "float32",
    context: Context | None = None,
) -> None:
    """Shard a model in place. Process 0 broadcasts its weights; the others may hold the model on the meta device.

    Args:
        mesh: device mesh of all processes.
        compute_dtype: with bfloat16 passes run under autocast, and the weights are gathered in 16 bits.
        context: the processes that share each pass; None: every process makes passes of its own.
    """
    # One unit after another goes to the mesh's device and to all processes: no device ever holds the whole model.
    device = _device_of_mesh(mesh)

    def from_leader(_name: str, tensor: Tensor) -> Tensor:
        placed = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        dist.broadcast(placed, src=0)
        return placed

    dtype = torch.bfloat16 if compute_dtype == "bfloat16" else None
    root = _Root(model, mesh, dtype)
    _shard(root, from_leader)
    set_context(model, context)


def sharded_copy(model: Any, dtype: torch.dtype | None) -> Any:
    """Return a frozen copy of a sharded model in eval mode, without its adapter, sharded alike.

    No whole tensor exists on the way.

    Args:
        dtype: dtype of the copy's parameters and of its passes; None: both as in the model.
    """
    root = _root_of(model)
    device = _device_of_mesh(root.mesh)
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

    _shard(_Root(copied, root.mesh, root.dtype if dtype is None else None), empty)
    sources = plain_parameters(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(sources[name])
    set_context(copied, context_of(model))
    return copied


def _shard(root: _Root, place: Callable[[str, Tensor], Tensor]) -> None:
    """Shard a model unit by unit. `place(name, tensor)` returns the tensor that replaces `tensor` in the model."""
    model: Any = root.model
    names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    done: set[int] = set()
    # the decoder layers: the classes that a Hugging Face model says must not be split
    layer_names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_names]
    precision = MixedPrecisionPolicy()
    if root.dtype is not None:
        # inputs keep their dtype: autocast casts those of matrix products alone
        precision = MixedPrecisionPolicy(param_dtype=root.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Layers first: what they own is done when the model itself, the last unit, takes the rest.
    for unit in [*layers, model]:
        placed: dict[int, Tensor] = {}  # by identity: tied tensors stay one
        for module in unit.modules():
            if id(module) in done:
                continue
            done.add(id(module))
            for own in (module._parameters, module._buffers):
                tensors: dict[str, Any] = own
                for leaf, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in placed:
                        new = place(names[id(module)] + leaf, tensor.detach())
                        if isinstance(tensor, nn.Parameter):
                            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                        placed[id(tensor)] = new
                    tensors[leaf] = placed[id(tensor)]
        sharded = fully_shard(
            root if unit is model else unit,
            mesh=root.mesh,
            # the root stays gathered (None): its backward pass comes first
            reshard_after_forward=None if unit is model else True,
            mp_policy=precision,
        )
        # sum the gradients, do not average them: each process's loss is already its share of the whole batch
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        root.units.append(sharded)
    if root.dtype is not None:
        # the residual stream stays in float32, as in a pass under autocast with weights in float32
        model.get_input_embeddings().register_forward_hook(lambda _module, _args, output: output.float())
        if root.mesh.device_type == "cpu":  # there layer_norm takes no wider input than its weight; CUDA widens both
            for module in model.modules():
                if isinstance(module, nn.LayerNorm) and module.weight is not None:
                    module.register_forward_pre_hook(lambda norm, args: (args[0].to(norm.weight.dtype),))
    model.__dict__[_ROOT] = root  # not as a submodule: the root holds the model


def _device_of_mesh(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
