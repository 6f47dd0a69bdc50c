"""The products of experts in the compute dtype, for mixtures of experts of transformers 5 (Qwen3-MoE and the like).

A layer keeps the weights of all its experts in two tensors, [E, 2 I, H] and [E, H, I], and sorts tokens by expert for
one grouped matrix product each. Autocast does not know that product: without this module it would run in float32, which
has no grouped kernel on a GPU. E experts, I their inner size, H hidden units, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

AUTOCAST_EXPERTS = "tba_autocast"
"""Name in transformers' table of functions for experts."""


def use_autocast_experts(model: Any) -> None:
    """Make the experts of a model, where it has any, compute in the dtype of autocast."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # a model keeps another function that was chosen for it, for example one that came with its code
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, autocast_experts)
        model.set_experts_implementation(AUTOCAST_EXPERTS)


def autocast_experts(
    module: Any, hidden: Float[Tensor, "T H"], experts: Int[Tensor, "T K"], weights: Float[Tensor, "T K"]
) -> Float[Tensor, "T H"]:
    """Return the weighted sum of the outputs of each token's experts, as a function of transformers' table."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        module = _Cast(module, torch.get_autocast_dtype(kind))
    return grouped_mm_experts_forward(module, hidden, experts, weights)


class _Cast:
    """A module whose parameters have another dtype; gradients go to its own."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value
