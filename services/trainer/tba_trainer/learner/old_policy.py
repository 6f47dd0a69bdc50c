"""The old policy `trainer`: behaviour log-probs that the trainer computes again, with the weights that sampled.

The sampler reports log-probs of its own engine. Computed again here, they differ from theta's only by staleness, and
from the sampler's only by the implementation (docs/algorithm.md, Mismatch).

    publish   ---> remember(version): copy theta's weights; drop the oldest copy
    batch     ---> logprobs(rollouts): per version of their spans, the copy takes theta's place for a pass

Log-probs are cached by rollout id. If the copy of a version is gone, its tokens get the sampler's log-probs, and are
counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tba.versions import PolicyVersion
from tba.wire import Rollout
from tba_trainer.learner.forward_backward import Ranks, Values
from tba_trainer.learner.reference import LogprobCache, compute_logprobs
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.parameters import copied, exchanged, trainable
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
        policy: LogprobModel,
        *,
        max_versions: int,
        max_cached: int,
        micro_batch_tokens: int,
        ranks: Ranks,
    ) -> None:
        self._theta, self._policy, self._ranks = trainable(model), policy, ranks
        self._max_versions, self._micro_batch_tokens = max_versions, micro_batch_tokens
        self._copies: list[_Copy] = []
        """Oldest first."""
        self.cache = LogprobCache(max_cached)
        self.num_missing_tokens = 0
        """Uncached tokens of the last batch without a copy of their version; they got the sampler's log-probs."""

    def remember(self, version: PolicyVersion, *, same_as: PolicyVersion | None = None) -> None:
        """Keep a copy of theta as `version`, and drop the oldest copies above `max_versions`.

        Args:
            same_as: an earlier version with the same weights, as after a resume; its copy then serves both.
        """
        known = self._of(same_as)
        if known is not None:
            known.versions.append(version)
            return
        self._copies.append(_Copy([version], copied(self._theta)))
        del self._copies[: -self._max_versions]

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Values]:
        """Return the log-prob of every trained token under the policy that sampled it."""
        missing = {r.rollout_id: r for r in rollouts if self.cache.get(r, r.num_sampled) is None}
        found = {key: rollout.sampler_logprobs.astype(np.float64) for key, rollout in missing.items()}
        self.num_missing_tokens = 0
        for version in sorted({span.version for rollout in missing.values() for span in rollout.version_spans}):
            masks = {key: np.zeros(r.num_sampled, dtype=np.bool_) for key, r in missing.items()}
            spans = [(key, s) for key, rollout in missing.items() for s in rollout.version_spans]
            for key, span in spans:
                masks[key][span.start : span.end] |= span.version == version
            copy = self._of(version)
            if copy is None:
                self.num_missing_tokens += sum(int(mask.sum()) for mask in masks.values())
                continue
            sampled = [rollout for key, rollout in missing.items() if masks[key].any()]
            with exchanged(self._theta, copy.tensors):  # there is no second model
                computed = compute_logprobs(
                    self._policy,
                    sampled,
                    per_token=True,
                    micro_batch_tokens=self._micro_batch_tokens,
                    ranks=self._ranks,
                )
            for rollout, values in zip(sampled, computed, strict=True):
                mask = masks[rollout.rollout_id]
                found[rollout.rollout_id][mask] = values[mask]
        for key, rollout in missing.items():
            self.cache.put(rollout, found[key])
        known = [self.cache.get(rollout, rollout.num_sampled) for rollout in rollouts]
        self.cache.evict()
        return [values for values in known if values is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies for a checkpoint, named `VERSIONS/NAME` and sharded as theta is."""
        return {f"{copy.key}/{name}": tensor for copy in self._copies for name, tensor in copy.tensors.items()}

    def load(self, tensors: Mapping[str, TensorSlice]) -> None:
        """Load the copies from a checkpoint."""
        # the order of the checkpoint: a resumed run drops the copies that the run that never stopped would drop
        keys = dict.fromkeys(name.partition("/")[0] for name in tensors)
        self._copies = [_Copy([PolicyVersion.parse(v) for v in key.split("+")], copied(self._theta)) for key in keys]
        load_tensors(self.tensors(), tensors, what="old policy")

    def _of(self, version: PolicyVersion | None) -> _Copy | None:
        return next((copy for copy in self._copies if version in copy.versions), None)
