"""Count the bytes of all tensors that are alive, op by op: the peak of a step, on a CPU or on fake tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is open, `peak` follows the bytes of all storages that were there or that an op has made.

    Storages that FSDP resizes count with their size of the moment. Memory inside of an op is not seen.

    Args:
        is_counted: which tensors count; None: those on the CPU.
        on_peak: called at each new peak.
    """

    def __init__(
        self, is_counted: Callable[[Tensor], bool] | None = None, on_peak: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.held = 0
        """Bytes of this moment."""
        self.peak = 0
        self._is_counted = is_counted or (lambda tensor: tensor.device.type == "cpu")
        self._on_peak = on_peak
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
        if self.held > self.peak:
            self.peak = self.held
            if self._on_peak is not None:
                self._on_peak()

    def _measure_again(self) -> None:
        # FSDP frees a storage by resizing it, which is no op
        for reference in list(self._sizes):
            if (storage := reference()) is not None:
                size = storage.nbytes()
                self.held += size - self._sizes[reference]
                self._sizes[reference] = size

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.held -= self._sizes.pop(reference, 0)
