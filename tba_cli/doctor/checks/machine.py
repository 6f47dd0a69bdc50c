"""Check this machine.

GPUs: whether the recipe needs any, and whether torch can use them.
Disks and shared memory: whether there is room.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.config.reward import ModelScorerSpec
from tba.errors import ConfigError
from tba_cli.doctor.target import CheckResult, Target, fail, ok, skip, warn
from tba_cli.sizing.gpu_layout import GIB, named_gpus
from tba_cli.sizing.machine import Machine, cpu_machine

MIN_FREE_BYTES = 1 * GIB
MIN_SHM_BYTES = 1 * GIB
SHARED_MEMORY = Path("/dev/shm")
TORCH_TIMEOUT_S = 50.0
_ASK_TORCH = """
import json, sys, torch
cuda = torch.version.cuda
gpus = [[torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)] for i in range(torch.cuda.device_count())]
refused = {}
for name in sys.argv[1:]:
    try:
        torch.empty(1, device=name)
    except Exception as error:
        refused[name] = (str(error).strip() or type(error).__name__).partition("\\n")[0]
answer = {"torch": torch.__version__, "cuda": cuda, "usable": torch.cuda.is_available(), "gpus": gpus}
print(json.dumps({**answer, "refused": refused}))
"""


def check_devices(recipe: Recipe) -> None:
    """Raise ConfigError if torch cannot use a device of the recipe here; done before anything starts."""
    devices = {"trainer.device": recipe.trainer.device}
    # the simulated engine has no model, and an offline run no searcher
    if recipe.searcher.engine != "simulated" and not recipe.is_offline:
        devices["searcher.device"] = recipe.searcher.device
    for task, reward in recipe.reward.tasks.items():
        for number, spec in enumerate(reward.scorers):
            # `auto` takes what is there
            if isinstance(spec, ModelScorerSpec) and spec.device != "auto":
                devices[f"reward.tasks.{task}.scorers.{number}.device"] = spec.device
    # the import of torch takes seconds: a recipe for the CPU alone must not wait for it
    asked = {key: device for key, device in devices.items() if device != "cpu"}
    if not asked or importlib.util.find_spec("torch") is None:
        return
    answer = ask_torch(sorted(set(asked.values())))
    if isinstance(answer, str):
        raise ConfigError(f"torch cannot be imported: {answer}; install it again")
    for key, device in asked.items():
        if (refused := answer["refused"].get(device)) is not None:
            # a GPU that is not there at all needs another remedy than a wrong number of one
            fix = _no_gpu(answer) if device.startswith("cuda") and not answer["gpus"] else f"correct {key}"
            raise ConfigError(f"{key} {device!r} cannot be used: {refused}; {fix}")
    if (sentence := _too_few_gpus(recipe, len(answer["gpus"]))) is not None:
        raise ConfigError(f"{sentence}; correct local.gpus")


def _too_few_gpus(recipe: Recipe, num_gpus: int) -> str | None:
    highest = max(named_gpus(recipe), default=-1)
    if highest < num_gpus:
        return None
    return f"local.gpus names GPU {highest}, and this machine has {num_gpus} (the first is 0)"


def check_gpu(target: Target) -> Iterator[CheckResult]:
    """Compare the GPUs of this machine with what the recipe asks for."""
    recipe = target.recipe
    devices = {"trainer": recipe.trainer.device, "searcher": recipe.searcher.device}
    users = sorted(name for name, device in devices.items() if name in target.services and device != "cpu")
    answer = ask_torch() if importlib.util.find_spec("torch") else "it is not installed here"
    if isinstance(answer, str):
        if target.services & devices.keys():
            yield fail(
                "gpu", f"torch cannot be imported: {answer}", "install tba-trainer or tba-searcher, or its image"
            )
        else:
            yield skip("gpu", f"{', '.join(sorted(target.services))} needs no GPU; torch cannot be imported: {answer}")
        return
    # torch may count GPUs that this CUDA build cannot use
    gpus = answer["gpus"] if answer["usable"] else []
    if users and not gpus:
        text = f"{' and '.join(users)} want a GPU, but torch sees none; it is torch {answer['torch']}"
        yield fail("gpu", text, _no_gpu(answer))
        return
    names = ", ".join(f"{name} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)" for name, free, total in gpus)
    asked = "" if users else "the recipe asks for none; "
    yield ok("gpu", f"{asked}{len(gpus)} usable{f': {names}' if names else ''}")
    # containers that see the same GPU run out of its memory, hours later
    if target.num_gpus is not None and len(gpus) != target.num_gpus:
        yield fail(
            "gpu-count",
            f"{len(gpus)} GPU(s) are visible here, but --gpus asks for {target.num_gpus}: other containers may use the "
            "same ones",
            "give each container its own (compose: device_ids, one each; chart: gpu.count)",
        )
    for name, key, num in (
        ("trainer", "trainer.num_processes", recipe.trainer.num_processes),
        ("searcher", "searcher.tensor_parallel_size", recipe.searcher.tensor_parallel_size),
    ):
        if name in users and num > len(gpus):
            yield fail(
                "gpu-count",
                f"{key} is {num}, and {len(gpus)} GPU(s) are seen here",
                f"give the {name} more GPUs (compose: device_ids, chart: {name}.gpu.count), or lower {key}",
            )
    if users and target.is_local and (sentence := _too_few_gpus(recipe, len(gpus))) is not None:
        yield fail("gpu-count", sentence, "correct local.gpus")


def _no_gpu(answer: dict[str, Any]) -> str:
    if answer["cuda"] is None:
        return "install the CUDA build of torch, or the GPU image; or set trainer.device and searcher.device to cpu"
    return (
        "give the container a GPU (compose: deploy.resources.reservations.devices; chart: gpu.count), install a driver "
        "that is new enough for this CUDA, or set the device to cpu"
    )


def ask_torch(devices: Sequence[str] = ()) -> dict[str, Any] | str:
    """Return torch's version, its GPUs and the refused devices; or, as text, why torch cannot be asked.

    A child process imports torch, because the command line itself never does.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH, *devices],
            capture_output=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TORCH_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    # the last line: torch and its plugins may print before it
    return json.loads(done.stdout.splitlines()[-1])


def this_machine() -> Machine:
    """Return the cores, memory and GPUs that a run may use here."""
    answer = ask_torch()
    gpus = answer["gpus"] if isinstance(answer, dict) and answer["usable"] else []
    has_vllm = importlib.util.find_spec("vllm") is not None
    return replace(cpu_machine(), gpu_bytes=[total_bytes for *_, total_bytes in gpus], has_vllm=has_vllm)


def check_disk(target: Target) -> Iterator[CheckResult]:
    """Check that the services can write to their folders, that these have free space, and the size of shared memory."""
    recipe, weights_bytes, folder = target.recipe, 0, Path(target.recipe.model.path)
    if {"trainer", "searcher"} & target.services and folder.is_dir():
        # two versions: the one in use and the one that is being pulled or written
        weights_bytes = 2 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # weights are written to the store and to temporary files alone
    places = {"temporary files": (Path(tempfile.gettempdir()), weights_bytes)}
    if (caches := Path.home() / ".cache").is_dir():
        places["caches"] = (caches, 0)
    if recipe.store.cache_folder is not None:
        places["the cache of weights"] = (Path(recipe.store.cache_folder), weights_bytes)
    if target.is_local:
        places["runs"] = (Path(recipe.local.runs_dir), 0)
    scheme, _, rest = recipe.store.url.partition("://")
    if scheme == "file" and rest.startswith("/"):
        places["the object store"] = (Path(rest), weights_bytes)
    for what, (path, written_bytes) in places.items():
        # the folder may not exist yet: then its first existing parent decides
        there = path.expanduser().absolute()
        while not there.exists():
            there = there.parent
        # read-only root file systems are usual in clusters
        if not os.access(there, os.W_OK):
            yield fail(
                "disk",
                f"{there} ({what}) cannot be written by user {os.getuid()}",
                "mount a writable volume or tmpfs there, or give the user the folder",
            )
            continue
        free, need_bytes = shutil.disk_usage(there).free, max(MIN_FREE_BYTES, written_bytes)
        text = f"{free / GIB:.1f} GiB are free at {there} ({what}), and {need_bytes / GIB:.1f} GiB are needed"
        if free < need_bytes:
            yield warn("disk", text, "free some space, or mount a larger volume (emptyDir sizeLimit, tmpfs size)")
        else:
            yield ok("disk", text)
    if not SHARED_MEMORY.is_dir():
        return
    asked = {
        "a trainer of several processes": recipe.trainer.num_processes > 1 and "trainer" in target.services,
        "vLLM": recipe.searcher.engine == "vllm" and "searcher" in target.services,
    }
    users = [name for name, is_asked in asked.items() if is_asked]
    # containers have 64 MiB unless they ask for more, and NCCL then fails with an unrelated error message
    total = shutil.disk_usage(SHARED_MEMORY).total
    text = f"{SHARED_MEMORY} has {total / GIB:.2f} GiB"
    if users and total < MIN_SHM_BYTES:
        yield warn(
            "shared-memory",
            f"{text}, little for {' and '.join(users)}",
            "give it 1 GiB or more (docker: shm_size; chart: shm.sizeLimit of trainer and searcher)",
        )
    else:
        yield ok("shared-memory", text)
