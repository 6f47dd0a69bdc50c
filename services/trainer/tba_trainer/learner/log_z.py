"""The running log Z of every prompt: what Trajectory Balance learns beside the policy (centre `log_z`).

Gradient descent on log Z in (log Z + l_j - r_j / beta)^2 is a running mean: with V = beta log Z, and v the mean of
r_j - beta l_j over the rollouts of a prompt in a batch,

    V <- (1 - rate) V + rate v        (rate: learning rate times 2; V is in units of the reward, so a beta that moves
                                       does not move it)

The first batch of a prompt takes its own v: there it is VarGrad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tba.wire import Rollout


class RunningLogZ:
    """beta log Z by prompt; a checkpoint keeps it.

    Args:
        rate: share of a batch's estimate in the running one.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._values: dict[str, float] = {}
        self._pending: dict[str, float] = {}

    def values(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return beta log Z of each rollout's prompt; NaN: not known yet."""
        return [self._values.get(rollout.prompt_id, math.nan) for rollout in rollouts]

    def propose(self, rollouts: Sequence[Rollout], estimates: Sequence[float]) -> None:
        """Take this batch's estimates of beta log Z, one per rollout; `commit` makes them count."""
        of_prompt: dict[str, list[float]] = {}
        for rollout, estimate in zip(rollouts, estimates, strict=True):
            of_prompt.setdefault(rollout.prompt_id, []).append(estimate)
        self._pending = {prompt: float(np.mean(found)) for prompt, found in of_prompt.items()}

    def commit(self) -> None:
        """Move the running values: the batch was applied."""
        for prompt, estimate in self._pending.items():
            before = self._values.get(prompt, estimate)
            self._values[prompt] = (1 - self._rate) * before + self._rate * estimate
        self.discard()

    def discard(self) -> None:
        """Forget the proposal: the batch was not applied."""
        self._pending = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return `prompt_ids` (UTF-8, one after the other), `num_bytes` of each [n] and `values` [n]."""
        names = [prompt.encode() for prompt in self._values]
        return {
            "prompt_ids": torch.frombuffer(bytearray(b"".join(names) or b"\0"), dtype=torch.uint8),
            "num_bytes": torch.tensor([len(name) for name in names], dtype=torch.int64),
            "values": torch.tensor(list(self._values.values()), dtype=torch.float64),
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the values from a checkpoint."""
        text, start = tensors["prompt_ids"].numpy().tobytes(), 0
        self._values = {}
        for num_bytes, value in zip(tensors["num_bytes"].tolist(), tensors["values"].tolist(), strict=True):
            self._values[text[start : start + num_bytes].decode()] = value
            start += num_bytes
