"""The reference policy: a frozen model with a version, and its sequence log-probs cached by rollout id.

A reference log-prob is valid for one reference version only. A reset to theta makes a new version and empties the
cache; a value that a rollout carries is used only if it names the version that is current.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.versions import START, PolicyVersion
from tba.wire import Rollout
from tba_trainer.logprobs import LogprobModel
from tba_trainer.microbatch import pad_sequences, plan_rows
from tba_trainer.model import frozen_copy, load_tensors, snapshot


class Reference:
    """The reference policy.

    Args:
        model: the starting model; a frozen copy is kept.
        temperature: policy temperature.
        autocast_dtype: as for theta.
        micro_batch_tokens: most padded tokens of one forward pass.
        max_cached: rollouts whose log-prob is kept; the least recently used goes first.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        autocast_dtype: torch.dtype | None,
        micro_batch_tokens: int,
        max_cached: int,
    ) -> None:
        self._model = frozen_copy(model)
        self._logprobs = LogprobModel(self._model, temperature=temperature, autocast_dtype=autocast_dtype)
        self._micro_batch_tokens = micro_batch_tokens
        self._max_cached = max_cached
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self.version = START
        self.num_computed = 0
        """Rollouts that went through the reference model so far."""

    @property
    def is_start(self) -> bool:
        """Whether the reference still is the starting model."""
        return self.version == START

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Sum of the reference's log-probs over each response."""
        missing = {r.rollout_id: r for r in rollouts if self._known(r) is None}
        self._compute(list(missing.values()))
        values = []
        for rollout in rollouts:
            value = self._known(rollout)
            assert value is not None
            values.append(value)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return values

    def reset(self, model: Any, version: PolicyVersion) -> None:
        """Make theta, which is `version`, the reference."""
        self.load(snapshot(model), version)

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Take a reference from named tensors."""
        load_tensors(self._model, tensors, what=f"reference {version}")
        self.version = version
        self._cache.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The reference's parameters as CPU copies."""
        return snapshot(self._model)

    def cache_tensors(self) -> dict[str, Tensor]:
        """The cache, least recently used first: `rollout_ids` uint8 [n, 16], `ref_logprobs` float64 [n].

        A checkpoint keeps it, because a log-prob that is computed again in other company may differ in the last bit.
        """
        ids = np.frombuffer(b"".join(self._cache), dtype=np.uint8).reshape(len(self._cache), 16)
        values = np.fromiter(self._cache.values(), dtype=np.float64, count=len(self._cache))
        return {"rollout_ids": torch.from_numpy(ids.copy()), "ref_logprobs": torch.from_numpy(values)}

    def load_cache(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the cache from a checkpoint."""
        ids, values = tensors["rollout_ids"].numpy(), tensors["ref_logprobs"].numpy()
        self._cache = OrderedDict((row.tobytes(), float(value)) for row, value in zip(ids, values, strict=True))

    def _known(self, rollout: Rollout) -> float | None:
        carried = rollout.ref_logprob
        if carried is not None and carried.version == self.version:
            return carried.value
        if rollout.rollout_id in self._cache:
            self._cache.move_to_end(rollout.rollout_id)
            return self._cache[rollout.rollout_id]
        return None

    @torch.no_grad()
    def _compute(self, rollouts: Sequence[Rollout]) -> None:
        lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts]
        for rows in plan_rows(lengths, self._micro_batch_tokens):
            sequences = pad_sequences(
                [rollouts[i].prompt_tokens for i in rows],
                [rollouts[i].response_tokens for i in rows],
                self._logprobs.device,
            )
            sums = self._logprobs.token_logprobs(sequences).sum(dim=1).tolist()
            for i, value in zip(rows, sums, strict=True):
                self._cache[rollouts[i].rollout_id] = value
        self.num_computed += len(rollouts)
