"""The reference of a run with LoRA: theta's own model without its adapter, or under an older one. No second model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tba_trainer.model import load_tensors
from tba_trainer.parameters import is_adapted, trainable, whole_tensors
from tba_trainer.passes import Policy

_OUTER = ".lora_B."
"""The factor that an adapter begins with as zero."""


class AdapterReference:
    """The reference with LoRA (`reference_weights.ReferenceWeights`): theta's model under other adapter weights.

    Args:
        model: theta, with its adapter.
        policy: computes log-probs under it.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        self.policy = policy
        self._layers = [module for module in model.modules() if is_adapted(module)]
        self._theta = trainable(model)
        self._tensors: dict[str, Tensor] | None = None
        """The adapter of the reference; None: the starting model, which has none."""

    @contextmanager
    @torch.no_grad()
    def active(self) -> Iterator[None]:
        """While it is open, theta's model is the reference."""
        if self._tensors is None:
            with self._without_adapter():
                yield
            return
        kept = self._copies()
        self._put(self._tensors)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def take_theta(self) -> None:
        """The adapter as it is now becomes that of the reference."""
        self._tensors = self._copies()

    @torch.no_grad()
    def blend_theta(self, decay: float) -> None:
        """Move the adapter of the reference, factor by factor, towards theta's: decay * old + (1 - decay) * new.

        The starting model is any A with B = 0, so the first time A is taken over as it is.
        """
        if self._tensors is None:
            start = self._copies()
            for name in start:
                if _OUTER in name:
                    start[name].zero_()
            self._tensors = start
        for name, tensor in self._tensors.items():
            tensor.mul_(decay).add_(self._theta[name], alpha=1 - decay)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter of the reference, by the names of theta's; none while it is the starting model."""
        return whole_tensors(self._tensors or {})

    def load(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """Take an adapter of a reference that is not the starting model."""
        copies = self._copies()
        load_tensors(copies, tensors, what=what)
        self._tensors = copies

    def _copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._theta.items()}

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._theta.items():
            parameter.copy_(tensors[name])

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        # peft's own switch, enable_adapters, turns requires_grad off and on as well, which a sharded model, whose
        # parameters exist twice, does not follow; the flag alone is what `forward` looks at
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False
