"""The old policy `trainer`: behaviour log-probs that the trainer computes again, with the weights that sampled.

The sampler reports log-probs of its own engine. Computed again here they differ from theta's by staleness alone, and
from the sampler's by what the two implementations do differently (docs/algorithm.md, Mismatch).

    publish   ---> remember(version): a copy of theta's weights; the oldest copy goes
    batch     ---> logprobs(rollouts): per version of their spans, the copy takes theta's place for a pass

Log-probs of a rollout are kept by its id. Where a version is no longer there, its tokens have the sampler's log-probs,
and are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.versions import PolicyVersion
from tba.wire import Rollout
from tba_trainer.learner.forward_backward import Policy, Ranks
from tba_trainer.learner.logprob_cache import LogprobCache, Values, compute_logprobs
from tba_trainer.model.parameters import trainable
from tba_trainer.model.policy import load_tensors
from tba_trainer.model.slices import TensorSlice


@dataclass(frozen=True, slots=True)
class _Copy:
    """Weights, and every name that they were published under."""

    versions: list[PolicyVersion]
    tensors: dict[str, Tensor]

    @property
    def key(self) -> str:
        return "+".join(map(str, self.versions))


class OldPolicy:
    """Copies of theta at the last versions, and the log-probs under them."""

    def __init__(
        self,
        model: Any,
        policy: Policy,
        *,
        max_versions: int,
        max_cached: int,
        micro_batch_tokens: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._theta, self._policy = trainable(model), policy
        self._max_versions, self._micro_batch_tokens = max_versions, micro_batch_tokens
        self._ranks = ranks or Ranks()
        self._copies: list[_Copy] = []
        """Oldest first."""
        self._cache = LogprobCache(max_cached)
        self.num_missing_tokens = 0
        """Tokens that the last batch brought and whose version was not there; they have the sampler's log-probs."""

    @torch.no_grad()
    def remember(self, version: PolicyVersion, *, same_as: PolicyVersion | None = None) -> None:
        """Keep a copy of theta, which is `version` now.

        Args:
            same_as: another name of the same weights, as after a resume: then there is no second copy.
        """
        known = self._of(same_as)
        if known is not None:
            known.versions.append(version)
            return
        tensors = {name: parameter.detach().clone() for name, parameter in self._theta.items()}
        self._copies.append(_Copy([version], tensors))
        del self._copies[: -self._max_versions]

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Values]:
        """Return the log-prob of every response token under the policy that sampled it."""
        missing = {r.rollout_id: r for r in rollouts if self._cache.get(r, len(r.response_tokens)) is None}
        found = {key: rollout.sampler_logprobs.astype(np.float64) for key, rollout in missing.items()}
        self.num_missing_tokens = 0
        for version in sorted({span.version for rollout in missing.values() for span in rollout.version_spans}):
            spans = {key: [s for s in r.version_spans if s.version == version] for key, r in missing.items()}
            those = [rollout for key, rollout in missing.items() if spans[key]]
            copy = self._of(version)
            if copy is None:
                self.num_missing_tokens += sum(s.end - s.start for r in those for s in spans[r.rollout_id])
                continue
            for rollout, values in zip(those, self._under(copy, those), strict=True):
                for span in spans[rollout.rollout_id]:
                    found[rollout.rollout_id][span.start : span.end] = values[span.start : span.end]
        for key, rollout in missing.items():
            self._cache.put(rollout, found[key])
        known = [self._cache.get(rollout, len(rollout.response_tokens)) for rollout in rollouts]
        self._cache.evict()
        return [values for values in known if values is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies for a checkpoint, sharded as theta is, their names `VERSIONS/NAME`."""
        return {f"{copy.key}/{name}": tensor for copy in self._copies for name, tensor in copy.tensors.items()}

    def cache_tensors(self) -> dict[str, Tensor]:
        """Return the cache of log-probs for a checkpoint."""
        return self._cache.tensors()

    def load(self, tensors: Mapping[str, TensorSlice], cache: Mapping[str, Tensor]) -> None:
        """Load the copies and the cache from a checkpoint."""
        # the order of the checkpoint: a resumed run drops the copies that the run that never stopped would drop
        keys = dict.fromkeys(name.partition("/")[0] for name in tensors)
        found = {
            key: {name: torch.empty_like(p, requires_grad=False) for name, p in self._theta.items()} for key in keys
        }
        named = {f"{key}/{name}": copy for key, copies in found.items() for name, copy in copies.items()}
        load_tensors(named, tensors, what="old policy")
        self._copies = [
            _Copy([PolicyVersion.parse(version) for version in key.split("+")], copies) for key, copies in found.items()
        ]
        self._cache.load(cache)

    def _of(self, version: PolicyVersion | None) -> _Copy | None:
        return next((copy for copy in self._copies if version in copy.versions), None)

    @torch.no_grad()
    def _under(self, copy: _Copy, rollouts: Sequence[Rollout]) -> list[Values]:
        # theta's weights are put aside and put back bit by bit, also after an error: there is no second model
        kept = {name: parameter.detach().clone() for name, parameter in self._theta.items()}
        self._put(copy.tensors)
        try:
            return compute_logprobs(
                self._policy,
                rollouts,
                per_token=True,
                micro_batch_tokens=self._micro_batch_tokens,
                ranks=self._ranks,
            )
        finally:
            self._put(kept)

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._theta.items():
            parameter.copy_(tensors[name])
