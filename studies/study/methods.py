"""The compared methods: presets of the product, and a few of them with other parts.

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

    def section(self, beta: Mapping[str, Any]) -> dict[str, Any]:
        """[objective] of a recipe."""
        return {**self.objective, "beta": dict(beta)}


def _method(preset: str, beta: float = 0.0, **overrides: Any) -> Method:
    return Method(objective=MappingProxyType({"preset": preset, **overrides}), beta=beta)


def _corrected(preset: str, weight: str) -> Method:
    """Rho to theta itself, so 1, and the delay is corrected by pi_theta / pi_sampler alone, without a trust region."""
    return _method(preset, old_policy="theta", mismatch_weight=weight)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        # always in the full comparison
        "tba_prime": _method("tba_prime", 0.1),
        "tba_prime_clip": _method("tba_prime_clip", 0.1),
        "grpo": _method("grpo"),
        "tba_prime_published": _method("tba_prime_published", 0.01, old_policy="sampler"),
        "dr_grpo": _method("dr_grpo"),
        "tb": _method("tb", 0.2),
        "dr_grpo_clamp": _method("dr_grpo_clamp"),
        "tb_positive": _method("tb_positive", 0.1),
        # in it if screening says so
        "tba_prime_fixed": _method("tba_prime", 0.2, anchor="fixed"),
        "tba_prime_unweighted": _method("tba_prime_unweighted", 0.1),
        "tb_log_z": _method("tb_log_z", 0.2),
        "kimi": _method("kimi", 0.1),
        "oapl": _method("oapl", 0.1),
        "tb_behaviour": _method("tb_behaviour", 0.4),
        "dapo": _method("dapo"),
        "gspo": _method("gspo"),
        "cispo": _method("cispo"),
        "m2po": _method("m2po"),
        "rloo": _method("rloo"),
        "proximal_rloo": _method("proximal_rloo"),
        "ppo_clip": _method("ppo_clip"),
        "reinforce": _method("reinforce"),
        "online_dpo": _method("online_dpo", 0.2),
        "raft": _method("raft"),
        "grpo_truncate": _corrected("grpo", "truncate"),
        "grpo_mask": _corrected("grpo", "mask"),
        "grpo_uncorrected": _corrected("grpo", "none"),
        "dr_grpo_truncate": _corrected("dr_grpo", "truncate"),
        "dr_grpo_mask": _corrected("dr_grpo", "mask"),
        "dr_grpo_uncorrected": _corrected("dr_grpo", "none"),
        "grpo_dual_clip": _method("grpo", dual_clip=3.0),
        "grpo_penalty": _method("grpo", log_ratio_penalty=0.01),
    }
)
"""By name. `tba_prime_published` takes the sampler's log-probs: here they are what the trainer would compute again with
the same weights."""

ALWAYS = (
    *("tba_prime", "tba_prime_clip", "grpo", "dr_grpo", "dr_grpo_clamp", "tb", "tba_prime_published"),
    "tb_positive",
)
