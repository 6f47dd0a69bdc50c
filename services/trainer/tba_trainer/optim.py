"""AdamW over float32 master weights, gradient clipping, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tba.config import TrainerSection
from tba.errors import TbaError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class NonFiniteError(TbaError):
    """The loss or the gradient is NaN or infinite; the weights have not been touched."""

    slug = "non-finite"


class Optimizer:
    """AdamW for a model; every step is told its learning rate.

    Args:
        model: its parameters are the float32 master weights.
    """

    def __init__(self, model: Any, section: TrainerSection) -> None:
        self._section = section
        self._parameters: dict[str, torch.nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=0.0,
            betas=(section.adam_beta1, section.adam_beta2),
            weight_decay=section.weight_decay,
        )

    def clip(self, *, step: int) -> float:
        """Clip the gradient by global norm; returns the norm before clipping.

        Raises:
            NonFiniteError: the norm is NaN or infinite.
        """
        norm = float(
            torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), max_norm=self._section.max_grad_norm)
        )
        if norm != norm or norm == float("inf"):
            raise NonFiniteError(
                f"the gradient norm of step {step} is {norm}; the weights were not touched. Start a new run with a "
                "lower trainer.learning_rate or a larger objective.beta"
            )
        return norm

    def apply(self, *, learning_rate: float) -> None:
        """Make an optimizer step with the gradients at hand, then drop them."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` of every parameter that has been updated, on the CPU."""
        return {
            f"{moment}.{name}": self._adamw.state[parameter][moment].detach().to("cpu", copy=True).contiguous()
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state from a checkpoint.

        Raises:
            TbaError: a tensor belongs to no parameter, or has another shape.
        """
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            parameter = self._parameters.get(name)
            if parameter is None or moment not in _MOMENTS:
                raise TbaError(f"optimizer state {key!r} in the checkpoint belongs to no parameter of this model")
            if moment != "step" and tensor.shape != parameter.shape:
                raise TbaError(
                    f"optimizer state {key!r} has shape {list(tensor.shape)}, the model {list(parameter.shape)}"
                )
            # AdamW keeps `step` on the CPU
            self._adamw.state[parameter][moment] = (
                tensor.clone() if moment == "step" else tensor.to(parameter.device, copy=True)
            )
