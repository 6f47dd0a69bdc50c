"""Large tensors without memory beside small real ones, and the bytes of all that are alive: for a step on shapes alone.

torch's fake tensors have a shape, a dtype and the size of their storage, and no values. The model is fake. What the
trainer keeps on the CPU (plans, sums per rollout, metrics) is real, so the control flow is that of a real step, and
every number that comes from the model is 0. They say that they are on the CPU, and `cuda_branches` makes the output
head take the branches that it takes on CUDA: a build of torch without CUDA cannot run the backward pass of tensors that
say "cuda". tests/support/fake_cuda.py makes it do so with a few lines of C++, for a check of every step in CI.
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
"""A tensor of values that an op makes from nothing is fake from this size on."""
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)
"""Ops that make a tensor without values: shards, and what FSDP gathers and sums in, which are fake at any size."""


class FakeDevice(TorchDispatchMode):
    """While it is open, ops on fake tensors run on shapes, and all others as ever."""

    type = "cpu"
    """Of its tensors."""

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
        """Return whether a tensor is one of this device, without values."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake_mode


class LiveBytes(TorchDispatchMode):
    """While it is open, `peak` follows the bytes of all storages that were there or that an op has made.

    Storages that FSDP resizes count with their size of the moment. Memory inside of an op is not seen.

    Args:
        is_counted: which tensors count; None: those on the CPU.
    """

    def __init__(self, is_counted: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self.held = 0
        """Bytes of this moment."""
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
        """Begin a new peak at what is held now."""
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
    """Make the output head treat the CPU as it treats CUDA: chunks of logits, products with wide sums."""
    chunk_bytes = CHUNK_BYTES["cpu"]
    CHUNK_BYTES["cpu"] = CHUNK_BYTES["cuda"]
    WIDE_PRODUCTS.add("cpu")
    try:
        yield
    finally:
        CHUNK_BYTES["cpu"] = chunk_bytes
        WIDE_PRODUCTS.discard("cpu")
