"""A reward plugin whose version and value the environment decides: `TBA_TEST_REWARD=2` gives 2 for everything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tba_reward.registry import Example, Registry, Reward


def constant(prompt: str, response: str, data: Mapping[str, Any]) -> float:
    """The same for every completion."""
    return float(os.environ["TBA_TEST_REWARD"])


def register(registry: Registry) -> None:
    """Add `versioned`."""
    value = os.environ["TBA_TEST_REWARD"]
    example = Example(prompt="", response="", data={}, reward=float(value))
    registry.add(Reward(task="versioned", version=f"versioned-{value}", function=constant, example=example, fast=True))
