"""The machine: card, driver, versions, and the speeds that nothing on it can exceed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

from benchmarks.gpu_bench.check import Bench, Findings, seconds_of

PACKAGES = ("torch", "transformers", "triton", "vllm", "numpy", "safetensors", "peft")
GIB = 1024**3


def check_machine(bench: Bench, found: Findings) -> None:
    """Note what the numbers of all other checks depend on."""
    import torch

    found.note("python", platform.python_version())
    for name in PACKAGES:
        try:
            found.note(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.note(name, "missing")
    found.note("num_cores", os.cpu_count() or 0)
    found.note("memory_gib", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB)
    device, size = torch.device(bench.device), 512 if bench.quick else 8192
    if bench.device == "cuda":
        _note_card(found)
    num_bytes = 2**24 if bench.quick else 2**32
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    found.note("copy_gb_per_s", 2 * num_bytes / 1e9 / seconds_of(lambda: target.copy_(source), bench.device))
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn_like(left)
    found.note("bf16_tflop_per_s", 2 * size**3 / 1e12 / seconds_of(lambda: left @ right, bench.device))
    if bench.device == "cuda":
        host = torch.empty(num_bytes // 16, pin_memory=True)
        part = source[: len(host)]
        rate = 4 * len(host) / 1e9
        found.note("device_to_pinned_gb_per_s", rate / seconds_of(lambda: host.copy_(part), "cuda"))
        found.note("pinned_to_device_gb_per_s", rate / seconds_of(lambda: part.copy_(host), "cuda"))


def _note_card(found: Findings) -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    found.note("card", properties.name)
    found.note("num_cards", torch.cuda.device_count())
    found.note("card_memory_gib", properties.total_memory / GIB)
    found.note("capability", f"{properties.major}.{properties.minor}")
    found.note("cuda", torch.version.cuda or "none")
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        found.note("driver_and_used", answer.splitlines()[0])
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}", file=sys.stderr)
    free, total = torch.cuda.mem_get_info()
    # what a process has before its first tensor: context and libraries
    found.note("context_mib", (total - free) / 2**20)
