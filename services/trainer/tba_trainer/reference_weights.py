"""The weights of the reference, and the model under which its log-probs are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from tba_trainer.logprobs import LogprobModel
from tba_trainer.model import frozen_copy, load_tensors
from tba_trainer.parameters import whole_tensors
from tba_trainer.passes import Policy


class ReferenceWeights(Protocol):
    """What `ModelReference` needs; with LoRA theta's own model is used, with another adapter or none."""

    @property
    def policy(self) -> Policy:
        """Computes log-probs; under the reference's weights only while `active` is open."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """While it is open, `policy` is the reference."""
        ...

    def take_theta(self) -> None:
        """theta as it is now becomes the reference."""
        ...

    def blend_theta(self, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * theta."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What `load` takes: whole tensors on the CPU, one at a time; every process of a sharded model exhausts it."""
        ...

    def load(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """Take the reference from `tensors` of another start.

        Raises:
            TbaError: they are not those of this model.
        """
        ...


class FrozenCopy:
    """A second model beside theta.

    Args:
        theta: the model that is trained.
        model: its frozen copy.
        policy: computes log-probs under `model`.
    """

    def __init__(self, theta: Any, model: Any, policy: Policy) -> None:
        self._theta, self._model, self.policy = theta, model, policy

    @classmethod
    def of(cls, theta: Any, *, temperature: float, autocast_dtype: torch.dtype | None) -> FrozenCopy:
        """A copy of theta as it is now, at the policy temperature."""
        model = frozen_copy(theta)
        return cls(theta, model, LogprobModel(model, temperature=temperature, autocast_dtype=autocast_dtype))

    def active(self) -> AbstractContextManager[Any]:
        """The copy is always the reference."""
        return nullcontext()

    @torch.no_grad()
    def take_theta(self) -> None:
        """Copy theta."""
        for target, source in zip(self._model.parameters(), self._theta.parameters(), strict=True):
            target.copy_(source)

    @torch.no_grad()
    def blend_theta(self, decay: float) -> None:
        """reference = decay * reference + (1 - decay) * theta."""
        for target, source in zip(self._model.parameters(), self._theta.parameters(), strict=True):
            target.mul_(decay).add_(source, alpha=1 - decay)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The copy's parameters."""
        return whole_tensors(dict(self._model.named_parameters()))

    def load(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """Put tensors into the copy."""
        load_tensors(dict(self._model.named_parameters()), tensors, what=what)
