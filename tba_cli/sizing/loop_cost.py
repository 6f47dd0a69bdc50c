"""How long the trainer's loop stands still for a version or a checkpoint.

    version      its copy from the device to memory; files, deltas, digests and the transfer come beside training
    checkpoint   its copy from the devices to memory or to files on the local disk (`trainer.checkpoint_staging`;
                 with "auto" the memory that is free then decides); digests and the transfer come beside training

Not counted: the canary of a version, one pass through the weights; with several processes the gathering of its
tensors; the files of the version before, where its turn to be published has not come yet; the first allocation of
pinned memory. Only a checkpoint of at least `trainer.background_checkpoint_bytes` has its transfer beside training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tba.config import Recipe
from tba_cli.sizing.estimate import F32, Estimate, Load, num_trained
from tba_cli.sizing.model_shape import ModelShape

DEVICE_BYTES_PER_S = 55e9
"""From a GPU to pinned memory, measured on an H200 (docs/gpu.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCost:
    """What the loop waits for, every so many steps."""

    device_s: float
    disk_s: float
    interval_steps: int
    step_s: float

    @property
    def total_s(self) -> float:
        """Seconds for each version or checkpoint."""
        return self.device_s + self.disk_s

    @property
    def step_share(self) -> float:
        """Of one step."""
        return self.total_s / self.step_s

    @property
    def loop_share(self) -> float:
        """Of the steps from one to the next."""
        return self.step_share / self.interval_steps


def loop_costs(
    recipe: Recipe, shape: ModelShape, found: Estimate, load: Load, *, disk_bytes_per_s: float
) -> dict[str, LoopCost]:
    """Return the cost of a version and of a checkpoint, this by where its copy may be.

    Args:
        found: for this recipe.
        disk_bytes_per_s: of all processes together: those of one machine share its disk.
    """
    section, lora = recipe.trainer, recipe.model.lora
    is_adapter = lora is not None and lora.publish == "adapter"
    version_bytes = F32 * num_trained(recipe, shape) if is_adapter else found.version_bytes
    memory = LoopCost(
        device_s=found.checkpoint_bytes / section.num_processes / DEVICE_BYTES_PER_S,
        disk_s=0.0,
        interval_steps=section.checkpoint_interval,
        step_s=load.step_s,
    )
    disk = replace(memory, disk_s=found.checkpoint_bytes / disk_bytes_per_s)
    places = {"memory": memory, "disk": disk}
    staging = section.checkpoint_staging
    checkpoints = {f"checkpoint_{name}": cost for name, cost in places.items() if staging in ("auto", name)}
    return {
        # every process copies the tensors that it stores, about the same bytes; an adapter the leader alone
        "version": LoopCost(
            device_s=version_bytes / (1 if is_adapter else section.num_processes) / DEVICE_BYTES_PER_S,
            disk_s=version_bytes / disk_bytes_per_s if is_adapter else 0.0,
            interval_steps=section.sync_interval,
            step_s=load.step_s,
        ),
    } | checkpoints
