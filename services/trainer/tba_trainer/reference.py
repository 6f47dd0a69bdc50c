"""The reference policy: where sequence log-probs under it come from, and when it changes.

    objective.reference_placement
      trainer    ModelReference    a model here (or theta's, with LoRA), with a cache by rollout id
      searcher   CarriedReference  no model here: every rollout carries its log-prob under the starting model
      (none)     Reference         the objective's anchor needs no reference: nothing is held or computed

A reference log-prob is valid for one reference version only. A reset to theta, or an update of the moving average,
makes a new version and empties the cache; a value that a rollout carries is used only if it names the version that is
current.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tba.config import Recipe
from tba.errors import ConfigError, MalformedError
from tba.versions import START, PolicyVersion
from tba.wire import Rollout
from tba_trainer.objectives import Objective
from tba_trainer.packing import response_sums
from tba_trainer.passes import Ranks, packed_rollouts
from tba_trainer.planning import plan_micro_batches
from tba_trainer.reference_weights import ReferenceWeights


class Reference:
    """No reference enters the objective; the base of the other two."""

    def __init__(self) -> None:
        self.version = START
        self.num_computed = 0
        """Rollouts that went through the reference model so far."""
        self._cache: OrderedDict[bytes, float] = OrderedDict()

    @property
    def is_start(self) -> bool:
        """Whether the reference still is the starting model."""
        return self.version == START

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[float] | None:
        """Sum of the reference's log-probs over each response; None: nobody needs them."""
        return None

    def after_step(self, version: PolicyVersion) -> None:
        """What is due once theta is `version`: a reset, an update of the moving average, or nothing."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The reference's weights for a checkpoint, whole, one at a time."""
        return iter(())

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Take the reference from a checkpoint where it was not the starting model any more.

        Raises:
            ConfigError: the recipe was changed to one that has only the starting model.
            TbaError: the tensors are not those of the model.
        """

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


class CarriedReference(Reference):
    """Searchers computed the log-probs under the starting model, and rollouts carry them."""

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[float]:
        """What the rollouts carry.

        Raises:
            MalformedError: one carries none of the starting model; screening.py refuses such a rollout before.
        """
        values = []
        for rollout in rollouts:
            carried = rollout.ref_logprob
            if carried is None or carried.version != START:
                what = f"rollout {rollout.rollout_id.hex()} of prompt {rollout.prompt_id!r}"
                raise MalformedError(
                    f"{what} carries no ref log-prob of the starting model, and objective.reference_placement is "
                    '"searcher"'
                )
            values.append(carried.value)
        return values

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Refused: searchers know only the starting model."""
        raise ConfigError(
            f"the checkpoint's reference is version {version}, and with objective.reference_placement = "
            '"searcher" it can only be the starting model; set it back to "trainer"'
        )


class ModelReference(Reference):
    """A reference whose log-probs are computed here, once per rollout and version.

    Args:
        weights: the starting model's, now.
        objective: says when the reference changes.
        micro_batch_tokens: most tokens of one forward pass.
        max_cached: rollouts whose log-prob is kept; the least recently used goes first.
        ranks: who share the passes; all know all values.
    """

    def __init__(
        self,
        weights: ReferenceWeights,
        objective: Objective,
        *,
        micro_batch_tokens: int,
        max_cached: int,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self._ranks = ranks or Ranks()
        self._weights, self._objective = weights, objective
        self._micro_batch_tokens, self._max_cached = micro_batch_tokens, max_cached

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

    def after_step(self, version: PolicyVersion) -> None:
        """Reset or update the reference where the objective says so at this step."""
        reset_steps, ema_steps = self._objective.reset_steps, self._objective.ema_every_steps
        if reset_steps is not None and version.step % reset_steps == 0:
            self._weights.take_theta()
            self._is_now(version)
        if ema_steps is not None and self._objective.ema_decay is not None and version.step % ema_steps == 0:
            self._weights.blend_theta(self._objective.ema_decay)
            self._is_now(version)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The reference's weights, whole, one at a time; every process of a sharded model must exhaust it."""
        return self._weights.tensors()

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Take the reference from a checkpoint."""
        self._weights.load(tensors, what=f"reference {version}")
        self._is_now(version)

    def _is_now(self, version: PolicyVersion) -> None:
        self.version = version
        self._cache.clear()

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
        if not rollouts:
            return
        lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts]
        ranks, policy = self._ranks, self._weights.policy
        plan = plan_micro_batches(
            lengths, range(len(rollouts)), self._micro_batch_tokens, num_ranks=ranks.num_ranks, keep_groups=False
        )
        sums = torch.zeros(len(rollouts), dtype=torch.float64)
        with self._weights.active():
            for micro_batch in plan.of_rank(ranks.rank):
                sequences = packed_rollouts([rollouts[i] for i in micro_batch.indices], policy.device)
                found = response_sums(policy.token_logprobs(sequences), sequences)[: len(micro_batch.indices)]
                sums[list(micro_batch.indices)] = found.double().cpu()
        for rollout, value in zip(rollouts, ranks.add_up(sums).tolist(), strict=True):
            self._cache[rollout.rollout_id] = value
        self.num_computed += len(rollouts)


def make_reference(
    objective: Objective, recipe: Recipe, weights: Callable[[], ReferenceWeights], ranks: Ranks | None = None
) -> Reference:
    """The reference that the objective needs.

    Args:
        weights: makes the reference's weights, which are the starting model's; called only if a model is needed here.
    """
    if objective.reference_placement is None:
        return Reference()
    if objective.reference_placement == "searcher":
        return CarriedReference()
    return ModelReference(
        weights(),
        objective,
        micro_batch_tokens=recipe.trainer.micro_batch_tokens,
        max_cached=recipe.buffer.max_rollouts,
        ranks=ranks,
    )
