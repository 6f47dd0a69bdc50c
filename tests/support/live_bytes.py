"""Counts the bytes that tensors of this process hold, op by op: what a GPU would have to hold, without one."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is open, `peak` follows the bytes of all storages that were there or that an op has made.

    Storages that FSDP resizes count with their size of the moment. What an op needs only inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}
        for value in gc.get_objects():
            if issubclass(type(value), Tensor) and value.device.type == "cpu":
                self._see(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves([args, kwargs, result]):
            if isinstance(value, Tensor):
                self._see(value)
        self.peak = max(self.peak, self._held())
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # a DTensor's own shard
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def _held(self) -> int:
        total = 0
        for key, reference in list(self._storages.items()):
            if reference.expired():
                del self._storages[key]
            elif (storage := torch.UntypedStorage._new_with_weak_ptr(reference.cdata)) is not None:
                total += storage.nbytes()
        return total
