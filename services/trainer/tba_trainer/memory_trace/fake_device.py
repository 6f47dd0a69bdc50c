"""Run a step on shapes alone: fake tensors beside small real ones, and a count of the bytes of live tensors.

torch's fake tensors have a shape, a dtype and the size of their storage, but no values. The model is fake. Tensors that
the trainer keeps on the CPU (plans, sums per rollout, metrics) are real, so the control flow is that of a real step.
Every number that comes from the model is 0. The device of the fake tensors is "cpu", because a torch without CUDA
cannot run the backward pass of tensors on "cuda". `cuda_branches` makes the output head take its CUDA branches anyway.
CI also checks every step on "cuda" (tests/support/fake_cuda.py, with a few lines of C++).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tba_trainer.model.logprobs import CHUNK_BYTES, WIDE_PRODUCTS

MIN_FAKE_BYTES = 1 << 20
"""A tensor that an op makes without input tensors is fake from this size on, and real below."""
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)
"""Ops that make uninitialised tensors, such as shards and buffers of FSDP. These tensors are fake at any size."""


class FakeDevice(TorchDispatchMode):
    """While it is open, ops on fake tensors run on shapes alone, and all other ops as usual."""

    type = "cpu"
    """Device type of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> FakeDevice:
        self.fake_mode.__enter__()  # below this mode: there DTensor looks for it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake_mode.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented  # it asks again with its own shard
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if all(tensor.is_meta for tensor in tensors):  # made from nothing
                result = func(*args, **kwargs)  # fake, by the mode below
                if not isinstance(result, Tensor) or result.is_meta or func.overloadpacket in _EMPTY:
                    return result
                if result.untyped_storage().nbytes() >= MIN_FAKE_BYTES:
                    return result
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten.allclose.default:
            return True  # whether the head is a plain product (logprobs.py): it is, in every packed family
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():  # a real table takes values from the model
                args, kwargs = tree_map_only(
                    FakeTensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), (args, kwargs)
                )
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a fake tensor of this device."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake_mode


class LiveBytes(TorchDispatchMode):
    """While it is open, count the bytes of all live storages, older ones included; `peak` is the maximum.

    Storages that FSDP resizes count with their current size. Memory that an op uses internally is not counted.

    Args:
        is_counted: which tensors count; None: those on the CPU.
    """

    def __init__(self, is_counted: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self.held = 0
        """Bytes that are live now."""
        self.peak = 0
        self._is_counted = is_counted or (lambda tensor: tensor.device.type == "cpu")
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._see(value for value in gc.get_objects() if issubclass(type(value), Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # a question that fake tensors are often asked; nothing is made
            return result
        self._see(value for value in tree_leaves([args, kwargs, result]) if isinstance(value, Tensor))
        return result

    def restart(self) -> None:
        """Set `peak` to the bytes that are live now."""
        self._measure_again()
        self.peak = self.held

    def _see(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own shard
            if self._is_counted(local):
                storage = local.untyped_storage()
                # torch keeps the Python object of a storage as long as the storage itself
                reference = weakref.ref(storage, self._forget)
                size = storage.nbytes()
                self.held += size - self._sizes.get(reference, 0)
                self._sizes[reference] = size
        if self.held > self.peak:
            self._measure_again()
        self.peak = max(self.peak, self.held)

    def _measure_again(self) -> None:
        # FSDP frees a storage by resizing it, which is no op
        for reference in list(self._sizes):
            if (storage := reference()) is not None:
                size = storage.nbytes()
                self.held += size - self._sizes[reference]
                self._sizes[reference] = size

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.held -= self._sizes.pop(reference, 0)


@contextmanager
def cuda_branches() -> Iterator[None]:
    """Make the output head treat the CPU as CUDA: chunk size of logits, and products of 16 bits with float32 sums."""
    chunk_bytes = CHUNK_BYTES["cpu"]
    CHUNK_BYTES["cpu"] = CHUNK_BYTES["cuda"]
    WIDE_PRODUCTS.add("cpu")
    try:
        yield
    finally:
        CHUNK_BYTES["cpu"] = chunk_bytes
        WIDE_PRODUCTS.discard("cpu")
