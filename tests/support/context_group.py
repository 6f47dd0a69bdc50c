"""The processes of a context group as threads of this one, over a real gloo group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tba_trainer.model.context import Context

WAIT = timedelta(seconds=60)
Result = TypeVar("Result")


def in_context_group(size: int, work: Callable[[Context], Result]) -> list[Result]:
    """Run `work` in `size` threads, each as one rank of the same group; return the results by rank."""
    torch_distributed: Any = dist  # whose stubs know neither store nor options
    store, gloo = torch_distributed.HashStore(), torch_distributed.ProcessGroupGloo

    def run(rank: int) -> Result:
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = WAIT
        group = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo(store, rank, size, options))
        return work(Context(group))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
