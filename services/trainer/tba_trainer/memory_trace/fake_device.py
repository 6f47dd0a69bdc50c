"""Large tensors without memory beside small real ones: the trainer's own step runs on shapes alone.

torch's fake tensors have a shape, a dtype and the size of their storage, and no values. The model is fake. What the
trainer keeps on the CPU (plans, sums per rollout, metrics) is real, so the control flow is that of a real step, and
every number that comes from the model is 0. They say that they are on the CPU, and `cuda_branches` makes the output
head take the branches that it takes on CUDA: a build of torch without CUDA cannot run the backward pass of tensors that
say "cuda". tests/support/fake_cuda.py makes it do so with a few lines of C++, for a check of every step in CI.
"""

from __future__ import annotations

from collections.abc import Iterator
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
            return _run_real(func, args, kwargs, from_nothing=all(tensor.is_meta for tensor in tensors))
        if func is torch.ops.aten.allclose.default:
            return True  # whether the head is a plain product (logprobs.py): it is, in every packed family
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():  # a real table takes values from the model
                args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs))
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of this device, without values."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake_mode


def _run_real(func: Any, args: Any, kwargs: Any, *, from_nothing: bool) -> Any:
    if from_nothing:
        result = func(*args, **kwargs)  # fake, by the mode below
        if not isinstance(result, Tensor) or result.is_meta or func.overloadpacket in _EMPTY:
            return result
        if result.untyped_storage().nbytes() >= MIN_FAKE_BYTES:
            return result
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _zeros(tensor: FakeTensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


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
