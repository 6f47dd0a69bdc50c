"""The machine that a run may use, and the settings that follow from it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.cgroups import core_limits, memory_limits
from tba.config import Recipe

DEVICES, CPU_INFO = Path("/dev"), Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores, memory and GPUs (the memory of each) that a run may use."""

    num_cores: int
    memory_bytes: int
    gpu_bytes: Sequence[int] = ()
    has_vllm: bool = False

    @property
    def num_threads(self) -> int:
        """Threads of a trainer on the CPU: half of the cores, since searchers use the others."""
        return max(1, self.num_cores // 2)

    @property
    def num_searchers(self) -> int:
        """Searchers on the CPU: half of the cores, at most 4."""
        return min(4, self.num_threads)


def cpu_machine() -> Machine:
    """Return the cores and memory that this process may use, as its cgroups limit them; GPUs are left out."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_cores = math.floor(min([len(os.sched_getaffinity(0)), *core_limits()]))
    return Machine(max(1, num_cores), min([total_bytes, *(limit for _, limit in memory_limits())]))


def bfloat16_warning(recipe: Recipe) -> str | None:
    """Return a warning if a processor without instructions for bfloat16 computes in it, with the advice after `; `."""
    used = {"trainer.compute_dtype": (recipe.trainer.device, recipe.trainer.compute_dtype)}
    used["model.dtype"] = recipe.searcher.device, recipe.model.dtype * (recipe.searcher.engine in ("embedded", "vllm"))
    keys = [key for key, (device, dtype) in used.items() if (device, dtype) == ("cpu", "bfloat16")]
    # as Linux names them: avx512_bf16, amx_bf16, bf16
    if not keys or not CPU_INFO.exists() or "bf16" in CPU_INFO.read_text(encoding="utf-8"):
        return None
    return (
        "the processor has no instructions for bfloat16, which then takes several times as long as float32; "
        f"set {' and '.join(keys)} to float32"
    )


def with_machine_defaults(recipe: Recipe, machine: Machine) -> tuple[Recipe, str | None]:
    """Return the recipe with values for this machine where it sets none, and a line that says which; None: none.

    On a CPU searchers take cores from the trainer. So they may be one batch ahead of it, and then wait.
    """
    searcher, sampling, trainer = recipe.searcher, recipe.sampling, recipe.trainer
    batch_rollouts = sampling.prompts_per_batch * sampling.group_size
    uses_cpu = trainer.device == searcher.device == "cpu"
    values: dict[str, dict[str, Any]] = {"searcher": {}, "sampling": {}, "trainer": {}}
    if searcher.engine == "embedded" and searcher.device == "cpu" and not recipe.is_offline:
        is_set = "num_searchers" in searcher.model_fields_set
        num = searcher.num_searchers if is_set else machine.num_searchers
        # more would only take more memory: that of the cache
        num_slots = min(searcher.num_slots, math.ceil(batch_rollouts / num))
        values["searcher"] = {"num_searchers": num, "num_slots": num_slots}
        if uses_cpu and not sampling.alternate and "samples_per_insert" not in sampling.model_fields_set:
            values["sampling"] = {"samples_per_insert": 1.0, "samples_per_insert_error": float(batch_rollouts)}
    elif searcher.device.startswith("cuda"):
        # without a list of GPUs all searchers would be on the first one
        values["searcher"] = {"num_searchers": len(recipe.local.gpus.searchers or [[0]])}
    if trainer.device == "cpu":
        values["trainer"] = {"torch_num_threads": machine.num_threads}
    update, shown = {}, list[str]()
    for name, given in values.items():
        section = getattr(recipe, name)
        chosen = {key: value for key, value in given.items() if key not in section.model_fields_set}
        update[name] = section.model_copy(update=chosen)
        shown += [f"{name}.{key} = {value:g}" for key, value in chosen.items()]
    if not shown:
        return recipe, None
    has_gpu = any(DEVICES.glob("nvidia[0-9]*"))
    idle = "a GPU that trainer.device and searcher.device leave idle" if has_gpu else "no GPU"
    line = f"this machine: {machine.num_cores} cores, {idle if uses_cpu else 'GPUs as in the recipe'}: "
    return recipe.model_copy(update=update), line + ", ".join(shown)
