"""Host memory: copies of tensors to it, and how much of it this process can still allocate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from tba.cgroups import CGROUPS, PROC, memory_limits
from tba.errors import TbaError
from tba.logs import get_logger

counts: Counter[str] = Counter()
"""Counters of this process. `unpinned`: copies of GPU tensors for which no pinned memory was left;
`checkpoint_not_staged`: checkpoints that did not fit into memory; `checkpoint_bytes`: size of the largest that did."""
log = get_logger("host_memory")


class HostMemoryError(TbaError):
    """The host has no memory for a copy of a tensor."""


def host_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of a tensor in host memory: pinned for a GPU tensor, if any pinned memory is left.

    Args:
        dtype: dtype of the copy; None: the tensor's own.

    Raises:
        HostMemoryError: there is no memory for the copy.
    """
    dtype = dtype or tensor.dtype
    # pinned memory, which torch keeps for the next copy, takes a GPU's tensor many times faster than new pages
    try:
        host = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    except RuntimeError as error:  # torch has no narrower one for either kind of memory
        if not tensor.is_cuda:
            raise _no_memory(tensor, dtype) from error
        if not counts["unpinned"]:  # said once, counted always
            log.warning("no_pinned_memory", num_bytes=_num_bytes(tensor, dtype), error=str(error).partition("\n")[0])
        counts["unpinned"] += 1
        try:
            host = torch.empty(tensor.shape, dtype=dtype)
        except RuntimeError as unpinned_error:
            raise _no_memory(tensor, dtype) from unpinned_error
    source = tensor.detach()
    if source.is_cuda:
        # cast on the device first: a copy off it that casts on its way takes thirty times as long (docs/gpu.md)
        with suppress(torch.OutOfMemoryError):  # without room for one tensor there it is slow, and right
            source = source.to(dtype)
    return host.copy_(source)


def host_copy_bytes(tensor: Tensor) -> int:
    """Return how many bytes `host_copy` takes at most: torch rounds pinned memory up to a power of two."""
    num_bytes = _num_bytes(tensor, tensor.dtype)
    return 1 << (num_bytes - 1).bit_length() if tensor.is_cuda and num_bytes else num_bytes


def free_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return how many more bytes this process can allocate, or None if the system does not say.

    This is the smallest of the machine's available memory and the memory left in each cgroup of the process.

    Args:
        proc, cgroups: where procfs and the cgroups are mounted.
    """
    try:
        available = re.search(
            r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return None
    if available is None:
        return None
    return max(0, min([1024 * int(available[1]), *_group_rooms(proc, cgroups)]))


def kept_pinned_bytes() -> int:
    """Return the bytes of unused pinned memory that torch caches for later copies; no other process can use them."""
    if not torch.cuda.is_initialized():
        return 0
    stats = torch.cuda.host_memory_stats()
    return max(0, stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0))


def _group_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the bytes left in each memory-limited cgroup of this process, ancestors included."""
    for folder, limit_bytes in memory_limits(proc=proc, cgroups=cgroups):
        is_old = not (folder / "memory.current").exists()
        usage, name = (
            ("memory.usage_in_bytes", "total_inactive_file") if is_old else ("memory.current", "inactive_file")
        )
        with suppress(OSError):
            used = int((folder / usage).read_text(encoding="utf-8"))
            # files that were read or written fill a group to its limit, and go when memory is needed
            files = re.search(rf"^{name} (\d+)$", (folder / "memory.stat").read_text(encoding="utf-8"), re.MULTILINE)
            yield limit_bytes - used + (int(files[1]) if files else 0)


def _num_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * dtype.itemsize


def _no_memory(tensor: Tensor, dtype: torch.dtype) -> HostMemoryError:
    return HostMemoryError(
        f"there is no memory for {_num_bytes(tensor, dtype)} bytes, a copy of a tensor of shape {list(tensor.shape)}; "
        "give the trainer's machine or container more"
    )
