"""GPUs: whether the recipe wants any, whether torch can use them, and whether the model fits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.config.reward import ModelScorerSpec
from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import Patient
from tba.errors import ConfigError
from tba.sizing import Load, estimate, shape_of_folder

TORCH_TIMEOUT_S = 50.0
NVIDIA_SMI_TIMEOUT_S = 10.0
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


def devices_of(recipe: Recipe) -> dict[str, str]:
    """Every device that the recipe names for `tba run`, by its key; `auto` takes what is there."""
    devices = {"trainer.device": recipe.trainer.device}
    if recipe.searcher.engine != "simulated" and not recipe.is_offline:
        devices["searcher.device"] = recipe.searcher.device
    for task, reward in recipe.reward.tasks.items():
        for number, spec in enumerate(reward.scorers):
            if isinstance(spec, ModelScorerSpec) and spec.device != "auto":
                devices[f"reward.tasks.{task}.scorers[{number}].device"] = spec.device
    return devices


def check_devices(recipe: Recipe) -> None:
    """Find out before anything starts that this machine lacks a device of the recipe; the CPU alone needs no question.

    Raises:
        ConfigError: it does, or has fewer GPUs than `local.gpus` names.
    """
    asked = {key: device for key, device in devices_of(recipe).items() if device != "cpu"}
    if not asked or importlib.util.find_spec("torch") is None:
        return
    answer = _ask_torch(sorted(set(asked.values())))
    if isinstance(answer, str):
        raise ConfigError(f"torch cannot be imported: {answer}; install it again")
    for key, device in asked.items():
        if (refused := answer["refused"].get(device)) is not None:
            mend = _no_gpu(answer) if device.startswith("cuda") and not answer["gpus"] else f"correct {key}"
            raise ConfigError(f"{key} {device!r} cannot be used: {refused}; {mend}")
    number = _highest_gpu(recipe)
    if number is not None and number >= len(answer["gpus"]):
        raise ConfigError(
            f"local.gpus names GPU {number}, and this machine has {len(answer['gpus'])} (the first is 0); correct "
            "local.gpus"
        )


def _highest_gpu(recipe: Recipe) -> int | None:
    gpus = recipe.local.gpus
    numbers = [*(gpus.reward or ()), *(gpus.trainer or ()), *(number for own in gpus.searchers or () for number in own)]
    return max(numbers, default=None)


def probe_gpu(patient: Patient) -> Iterator[Finding]:
    """GPUs of this machine beside what the recipe asks for."""
    recipe = patient.recipe
    devices = {"trainer": recipe.trainer.device, "searcher": recipe.searcher.device}
    wanting = sorted(name for name, device in devices.items() if name in patient.services and device != "cpu")
    driver = _nvidia_smi()
    seen = f"driver {driver}" if driver else "no NVIDIA driver (nvidia-smi)"
    if importlib.util.find_spec("torch") is None:
        if {"trainer", "searcher"} & patient.services:
            yield fail("gpu-torch", "torch is not installed here", "install tba-trainer or tba-searcher, or its image")
        else:
            yield skip("gpu", f"torch is not installed here, and {', '.join(sorted(patient.services))} needs no GPU")
        return
    answer = _ask_torch()
    if isinstance(answer, str):
        yield fail("gpu-torch", f"torch cannot be imported: {answer}", "install it again; the sentence says what broke")
        return
    gpus = answer["gpus"] if answer["usable"] else []
    names = ", ".join(f"{name} ({free / 2**30:.0f} of {total / 2**30:.0f} GiB free)" for name, free, total in gpus)
    if not wanting:
        yield ok("gpu", f"the recipe asks for none; {len(gpus)} usable{f': {names}' if names else ''}; {seen}")
        return
    if not gpus:
        build = (
            "torch was built without CUDA" if answer["cuda"] is None else f"torch is built for CUDA {answer['cuda']}"
        )
        yield fail("gpu", f"{' and '.join(wanting)} want a GPU, and torch sees none; {build}; {seen}", _no_gpu(answer))
        return
    yield ok("gpu", f"{names}; {seen}; torch {answer['torch']}, CUDA {answer['cuda']}")
    if patient.num_gpus is not None and len(gpus) != patient.num_gpus:
        yield fail(
            "gpu-count",
            f"{len(gpus)} GPU(s) are seen here, and {patient.num_gpus} should be (--gpus): others may use the same",
            "give each container its own (compose: device_ids, one each; chart: gpu.count)",
        )
    num_wanted = recipe.trainer.num_processes if "trainer" in wanting else 1
    if num_wanted > len(gpus):
        yield fail(
            "gpu-count",
            f"trainer.num_processes is {num_wanted}, and {len(gpus)} GPU(s) are seen here",
            "give the trainer more GPUs (compose: device_ids, chart: trainer.gpu.count), or lower num_processes",
        )
    yield from _memory(patient, wanting, min(free for _, free, _ in gpus))


def _memory(patient: Patient, wanting: list[str], free_bytes: int) -> Iterator[Finding]:
    recipe = patient.recipe
    try:
        shape = shape_of_folder(Path(recipe.model.path))
    except (ConfigError, OSError):
        yield skip("gpu-memory", f"{recipe.model.path} is not here, so nobody knows how much memory it takes")
        return
    section = recipe.searcher
    load = Load(
        prompt_tokens=max(1, section.max_prompt_tokens // 2),
        response_tokens=max(1, section.max_response_tokens // 2),
        step_s=10.0,
        num_searchers=section.num_searchers,
        concurrent_rollouts=section.num_slots,
    )
    sizes = estimate(recipe, shape, load)
    needs = {"trainer": sizes.trainer_gpu_bytes, "searcher": sizes.searcher_gpu_bytes}
    for name in wanting:
        text = (
            f"the {name} needs about {needs[name] / 2**30:.1f} GiB of a GPU, and {free_bytes / 2**30:.1f} GiB are free"
        )
        if needs[name] > free_bytes:
            yield warn(
                "gpu-memory",
                text,
                "use more or larger GPUs, LoRA, trainer.gradient_checkpointing, smaller micro-batches, or end what "
                "else is on them (a running service of this run counts too); `tba sizing RECIPE` shows the parts",
            )
        else:
            yield ok("gpu-memory", text)


def _no_gpu(answer: dict[str, Any]) -> str:
    if answer["cuda"] is None:
        return "install the CUDA build of torch, or the GPU image; or set trainer.device and searcher.device to cpu"
    return (
        "give the container a GPU (compose: deploy.resources.reservations.devices; chart: gpu.count of the service, "
        "and the NVIDIA device plugin on the node), install a driver that is new enough for this CUDA, or set the "
        "device to cpu"
    )


def _nvidia_smi() -> str | None:
    """Version of the driver; None: there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def _ask_torch(devices: Sequence[str] = ()) -> dict[str, Any] | str:
    """What torch says of itself, and which of the devices it refuses; a text is why it cannot."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH, *devices],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TORCH_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1])
