"""The compared methods: presets of the product.

A method says where its tuning begins (tuning.py). What it does not name has the preset's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One objective."""

    objective: Mapping[str, Any]
    learning_rate: float = 4e-4
    """Where tuning begins."""
    beta: float = 0.0
    """Where tuning begins; 0: the method has none, and it is not tuned."""


def _method(preset: str, beta: float = 0.0) -> Method:
    return Method(objective=MappingProxyType({"preset": preset}), beta=beta)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "tba_prime": _method("tba_prime", 0.1),
        "grpo": _method("grpo"),
        "tb_positive": _method("tb_positive", 0.1),
        "raft": _method("raft"),
        "tba_prime_clip": _method("tba_prime_clip", 0.1),
        "dr_grpo": _method("dr_grpo"),
        "dr_grpo_clamp": _method("dr_grpo_clamp"),
        "tb": _method("tb", 0.2),
        "tba_prime_published": _method("tba_prime_published", 0.01),
    }
)
"""By name: those that a screening of 31 left. `tba_prime_published` takes the sampler's log-probs, since the trainer
keeps no published version here: they are what it would compute again with the same weights."""
