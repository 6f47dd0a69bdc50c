"""AdamW over float32 master weights, with gradient clipping and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tba.config import TrainerSection
from tba.errors import TbaError
from tba_trainer.model.parameters import assign, full, trainable

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimizer:
    """AdamW of a model; every step is given its learning rate.

    Args:
        model: its parameters are the float32 master weights.
    """

    def __init__(self, model: Any, section: TrainerSection) -> None:
        self._section = section
        self._parameters = trainable(model)
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=0.0,
            betas=(section.adam_beta1, section.adam_beta2),
            weight_decay=section.weight_decay,
        )

    def clip(self) -> float:
        """Clip the gradient by global norm; return the norm before clipping, which may be NaN or infinite."""
        parameters = list(self._parameters.values())
        return float(full(torch.nn.utils.clip_grad_norm_(parameters, max_norm=self._section.max_grad_norm)))

    def apply(self, *, learning_rate: float) -> None:
        """Make an optimizer step with the current gradients, then drop them."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` of every updated parameter, whole, on the CPU.

        Every process of a sharded model must exhaust the iterator.
        """
        for name, parameter in self._parameters.items():
            state = self._adamw.state.get(parameter, {})
            for moment in _MOMENTS:
                if moment in state:
                    yield f"{moment}.{name}", full(state[moment].detach()).to("cpu", copy=True).contiguous()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state from a checkpoint.

        Raises:
            TbaError: a tensor belongs to no parameter, or has another shape.
        """
        self._adamw.state.clear()
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            parameter = self._parameters.get(name)
            if parameter is None or moment not in _MOMENTS:
                raise TbaError(f"optimizer state {key!r} in the checkpoint belongs to no parameter of this model")
            if moment == "step":  # AdamW keeps it on the CPU
                self._adamw.state[parameter][moment] = tensor.clone()
                continue
            if tensor.shape != parameter.shape:
                raise TbaError(
                    f"optimizer state {key!r} has shape {list(tensor.shape)}, the model {list(parameter.shape)}"
                )
            self._adamw.state[parameter][moment] = torch.empty_like(parameter, requires_grad=False)
            assign(self._adamw.state[parameter][moment], tensor)
