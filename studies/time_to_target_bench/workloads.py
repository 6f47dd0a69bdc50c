"""What is compared: recipes, targets and the grid of learning rates, which is the same for both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One task with its starting model."""

    recipe: Path
    learning_rates: tuple[float, ...]
    """The grid, the same for both sides. A best rate at its edge asks for a wider one."""
    targets: tuple[float, ...]
    """Of pass@1 at the policy temperature, 1 in every recipe."""
    num_steps: int
    """Optimizer steps of a cell, on both sides."""
    save_every_steps: int
    """The weights of both sides are measured after so many steps, and of the last. Between two points the curve is a
    line."""
    micro_batch: int
    """Rollouts of one forward and backward pass of TRL: memory, not arithmetic."""
    starter: str | None = None
    """The program that makes the starting model, one for all seeds; None: the recipe says how to make it."""


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "quickstart": Workload(
            recipe=ROOT / "recipes/quickstart.toml",
            learning_rates=(2e-4, 5e-4, 1e-3, 2e-3, 4e-3),
            targets=(0.90, 0.94),
            num_steps=120,
            save_every_steps=2,
            micro_batch=128,
        ),
        "chain": Workload(
            recipe=ROOT / "examples/worlds/chain/chain.toml",
            starter="examples.worlds.chain.prepare",
            learning_rates=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3),
            targets=(0.80, 0.90),
            num_steps=60,
            save_every_steps=4,
            micro_batch=32,
        ),
        "tally": Workload(
            recipe=ROOT / "examples/worlds/tally/tally.toml",
            starter="examples.worlds.tally.prepare",
            learning_rates=(1e-4, 2e-4, 4e-4),
            targets=(0.70, 0.80),
            num_steps=12,
            save_every_steps=3,
            micro_batch=32,
        ),
    }
)
"""By name: short responses, where generation costs little, and long-tailed ones, where it is most of a step."""
