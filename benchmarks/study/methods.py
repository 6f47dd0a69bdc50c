"""The compared methods: every preset and baseline of the product, each with the same number of settings to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One objective. `betas` are the two values that tuning tries, each with every learning rate."""

    objective: Mapping[str, Any]
    betas: tuple[float, float]
    is_family: bool

    def section(self, beta: float) -> dict[str, Any]:
        """[objective] of a recipe."""
        return {**self.objective, "beta": {"value": beta}}


def _family(preset: str, betas: tuple[float, float], **overrides: Any) -> Method:
    return Method(objective=MappingProxyType({"preset": preset, **overrides}), betas=betas, is_family=True)


def _baseline(preset: str, betas: tuple[float, float] = (0.0, 0.05)) -> Method:
    return Method(objective=MappingProxyType({"preset": preset}), betas=betas, is_family=False)


LEARNING_RATES = (1e-4, 2.5e-4, 6e-4)
METHODS = MappingProxyType(
    {
        "tba_prime": _family("tba_prime", (0.05, 0.2)),
        "grpo": _baseline("grpo"),
        "tba_prime_fixed": _family("tba_prime", (0.05, 0.2), anchor="fixed"),
        "ppo_clip": _baseline("ppo_clip"),
        "dr_grpo": _baseline("dr_grpo"),
        "tba_prime_unweighted": _family("tba_prime_unweighted", (0.05, 0.2)),
        "proximal_rloo": _baseline("proximal_rloo"),
        "tb": _family("tb", (0.2, 0.5)),
        "kimi": _family("kimi", (0.05, 0.2)),
        "rloo": _baseline("rloo"),
        "tb_behaviour": _family("tb_behaviour", (0.2, 1.0)),
        "reinforce": _baseline("reinforce"),
        "online_dpo": _baseline("online_dpo", (0.1, 0.5)),
    }
)
"""By name, in the order in which cells are run. `tba_prime_fixed` is the quickstart's: its reference is never reset."""
