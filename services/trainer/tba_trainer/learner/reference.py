"""The reference policy: where its log-probs come from, its weights, and when it changes.

    objective.reference_placement
      trainer    ModelReference    a model here (or theta's, with LoRA), with a cache by rollout id
      searcher   CarriedReference  no model here: every rollout carries its log-prob under the starting model
      (none)     Reference         the objective's anchor needs no reference: nothing is held or computed

A reference log-prob is valid for one reference version only. A reset to theta makes a new version.

A rollout may be drawn many times. Its log-probs under the reference and under the old policy (old_policy.py) are
computed once, and cached by its id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.config import Recipe
from tba.errors import ConfigError, MalformedError
from tba.versions import START, PolicyVersion
from tba.wire import Rollout
from tba_trainer.learner.forward_backward import Ranks, Values, pack_rollouts, plan_micro_batches
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import rollout_sums
from tba_trainer.model.parameters import copied, exchanged, has_adapter, is_adapted, trainable
from tba_trainer.model.policy import frozen_copy, load_tensors
from tba_trainer.model.slices import TensorSlice
from tba_trainer.objectives import Objective


class LogprobCache:
    """Log-probs by rollout id: the sum over the trained tokens [1], or one number per trained token [T].

    Args:
        max_rollouts: `evict` drops the least recently used rollouts above this number.
    """

    def __init__(self, max_rollouts: int = 0) -> None:
        self._max_rollouts = max_rollouts
        self._values: OrderedDict[bytes, Values] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, rollout: Rollout, num_values: int) -> Values | None:
        """Return the values of a rollout if there are exactly `num_values` of them, else None."""
        values = self._values.get(rollout.rollout_id)
        # other numbers come from a checkpoint that was made before the recipe asked for sums, or for tokens
        if values is None or len(values) != num_values:
            return None
        self._values.move_to_end(rollout.rollout_id)
        return values

    def put(self, rollout: Rollout, values: Values) -> None:
        """Keep the values of a rollout."""
        self._values[rollout.rollout_id] = values
        self._values.move_to_end(rollout.rollout_id)

    def evict(self) -> None:
        """Drop rollouts above `max_rollouts`. Call it after all reads, because a batch may be larger than the cache."""
        while len(self._values) > self._max_rollouts:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Drop everything: the policy has changed."""
        self._values.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the cache as tensors for a checkpoint, least recently used rollout first.

        `rollout_ids` uint8 [n, 16]; `ref_logprobs` float64, the values of all rollouts concatenated; `num_values` int64
        [n] of each rollout, left out if all are 1.
        """
        # The order is part of the state: a resumed run must evict what the run that was never stopped would evict.
        ids = np.frombuffer(b"".join(self._values), dtype=np.uint8).reshape(len(self._values), 16)
        values = np.concatenate([*self._values.values(), np.zeros(0)])
        tensors = {"rollout_ids": torch.from_numpy(ids.copy()), "ref_logprobs": torch.from_numpy(values)}
        lengths = torch.tensor([len(each) for each in self._values.values()], dtype=torch.int64)
        return tensors if bool((lengths == 1).all()) else {**tensors, "num_values": lengths}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the cache from a checkpoint."""
        ids, values = tensors["rollout_ids"].numpy(), tensors["ref_logprobs"].numpy()
        lengths = tensors["num_values"].numpy() if "num_values" in tensors else np.ones(len(ids), dtype=np.int64)
        parts = np.split(values, np.cumsum(lengths)[:-1]) if len(ids) else []
        self._values = OrderedDict((row.tobytes(), part) for row, part in zip(ids, parts, strict=True))


@torch.no_grad()
def compute_logprobs(
    policy: LogprobModel, rollouts: Sequence[Rollout], *, per_token: bool, micro_batch_tokens: int, ranks: Ranks
) -> list[Values]:
    """Return the log-probs of rollouts (at least one) under a policy. A collective: every rank gets all of them.

    Args:
        per_token: return one number per response token instead of their sum.
        micro_batch_tokens: most tokens of one forward pass.
    """
    plan = plan_micro_batches(
        # each rollout is a group of its own: its log-prob depends on no other rollout
        [r.num_tokens for r in rollouts],
        range(len(rollouts)),
        micro_batch_tokens,
        rows=range(len(rollouts)),
        num_ranks=ranks.num_ranks,
        keep_groups=False,
    )
    lengths = [r.num_sampled if per_token else 1 for r in rollouts]
    ends = np.cumsum(lengths).tolist()
    # each rank fills in its own rollouts; the sum over the ranks completes them
    values = torch.zeros(ends[-1], dtype=torch.float64)
    for micro_batches in plan:
        rows = micro_batches[ranks.rank]
        sequences = pack_rollouts([rollouts[i] for i in rows], policy.device)
        logprobs = policy.token_logprobs(sequences)  # [T]
        found = logprobs if per_token else rollout_sums(logprobs, sequences)
        at = [j for i in rows for j in range(ends[i] - lengths[i], ends[i])]
        # an empty micro-batch ran with a filler, which has a value too: the slice drops it
        values[at] = found[: len(at)].double().cpu()
    return [part.copy() for part in np.split(ranks.all_reduce(values).numpy(), ends[:-1])]


class Reference:
    """The reference of an objective that needs none, and the base class of the others."""

    def __init__(self, *, max_cached: int = 0) -> None:
        self.version = START
        self.num_computed = 0
        """Number of rollouts that have gone through the reference model."""
        self.cache = LogprobCache(max_cached)

    @property
    def is_start(self) -> bool:
        """Whether the reference is still the starting model."""
        return self.version == START

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Values] | None:
        """Return each rollout's ref log-probs, per token if the objective clamps tokens, else their sum.

        None: the objective needs no reference.
        """
        return None

    def after_step(self, version: PolicyVersion) -> None:
        """Reset the reference to theta, which is now `version`, if that is due. Called after every step."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the reference's weights for a checkpoint, sharded as theta is."""
        return {}

    def load(self, tensors: Mapping[str, TensorSlice], version: PolicyVersion) -> None:
        """Load the reference from a checkpoint in which it is not the starting model.

        Raises:
            ConfigError: the recipe was changed to one that has only the starting model.
            TbaError: the tensors are not those of the model.
        """


class CarriedReference(Reference):
    """A reference whose log-probs searchers compute, under the starting model; rollouts carry them."""

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Values]:
        """Return the values that the rollouts carry.

        Raises:
            MalformedError: one carries none of the starting model; `filter_batch` refuses such a rollout before.
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
            values.append(np.array([carried.value]))
        return values

    def load(self, tensors: Mapping[str, TensorSlice], version: PolicyVersion) -> None:
        """Raise ConfigError, because searchers know only the starting model."""
        raise ConfigError(
            f"the checkpoint's reference is version {version}, and with objective.reference_placement = "
            '"searcher" it can only be the starting model; set it back to "trainer"'
        )


class ModelReference(Reference):
    """A reference whose log-probs are computed here, once per rollout and version."""

    def __init__(
        self, weights: ReferenceWeights, objective: Objective, *, micro_batch_tokens: int, max_cached: int, ranks: Ranks
    ) -> None:
        super().__init__(max_cached=max_cached)
        self._weights, self._objective, self._ranks = weights, objective, ranks
        self._micro_batch_tokens = micro_batch_tokens

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Values]:
        """Return log-probs as `Reference.logprobs` does; compute those that are neither cached nor carried."""
        # by id: a rollout that is in the batch twice is computed once
        missing = list({r.rollout_id: r for r in rollouts if self._known(r) is None}.values())
        if missing:  # every rank sees the same cache, so every rank goes on: no collective is left waiting
            with self._weights.active():
                computed = compute_logprobs(
                    self._weights.policy,
                    missing,
                    per_token=self._objective.clamps_tokens,
                    micro_batch_tokens=self._micro_batch_tokens,
                    ranks=self._ranks,
                )
            for rollout, values in zip(missing, computed, strict=True):
                self.cache.put(rollout, values)
            self.num_computed += len(missing)
        found = []
        for rollout in rollouts:
            values = self._known(rollout)
            assert values is not None
            found.append(values)
        self.cache.evict()
        return found

    def after_step(self, version: PolicyVersion) -> None:
        """Reset the reference if the objective asks for it at this step."""
        reset_steps = self._objective.reset_steps
        # By step number and not by a counter: a resume in the middle of an interval resets at the same steps.
        if reset_steps is not None and version.step % reset_steps == 0:
            self._weights.reset_to_theta()
            self.version = version
            self.cache.clear()  # its log-probs are those of the old version

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the reference's weights."""
        return self._weights.tensors()

    def load(self, tensors: Mapping[str, TensorSlice], version: PolicyVersion) -> None:
        """Load the reference from a checkpoint."""
        self._weights.load(tensors, what=f"reference {version}")
        self.version = version
        self.cache.clear()

    def _known(self, rollout: Rollout) -> Values | None:
        per_token = self._objective.clamps_tokens
        # a carried value counts only if it names the current version; it is a sum
        carried = rollout.ref_logprob
        if carried is not None and carried.version == self.version and not per_token:
            return np.array([carried.value])
        return self.cache.get(rollout, rollout.num_sampled if per_token else 1)


def make_reference(
    objective: Objective, recipe: Recipe, policy: LogprobModel, autocast_dtype: torch.dtype | None, ranks: Ranks
) -> Reference:
    """Return the reference that the objective needs.

    Args:
        policy: theta, still with its starting weights.
        autocast_dtype: autocast dtype of the passes of a second model.
    """
    if objective.reference_placement is None:
        return Reference()
    if objective.reference_placement == "searcher":
        return CarriedReference()
    if has_adapter(policy.model):  # theta's model without its adapter is the starting model
        weights: ReferenceWeights = AdapterWeights(policy.model, policy)
    else:
        temperature = recipe.model.policy_temperature
        weights = FrozenCopyWeights(policy.model, temperature=temperature, autocast_dtype=autocast_dtype)
    return ModelReference(
        weights,
        objective,
        micro_batch_tokens=recipe.trainer.micro_batch_tokens,
        max_cached=recipe.buffer.max_rollouts,
        ranks=ranks,
    )


class FrozenCopyWeights:
    """Weights of the reference in a second model beside theta."""

    def __init__(self, theta: Any, *, temperature: float, autocast_dtype: torch.dtype | None) -> None:
        self._theta, self._model = theta, frozen_copy(theta)
        self.policy = LogprobModel(self._model, temperature=temperature, autocast_dtype=autocast_dtype)

    def active(self) -> AbstractContextManager[Any]:
        """Do nothing: the copy is always the reference."""
        return nullcontext()

    @torch.no_grad()
    def reset_to_theta(self) -> None:
        """Copy theta into the second model."""
        for target, source in zip(self._model.parameters(), self._theta.parameters(), strict=True):
            target.copy_(source)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the copy's parameters."""
        return dict(self._model.named_parameters())

    def load(self, tensors: Mapping[str, Tensor] | Mapping[str, TensorSlice], *, what: str) -> None:
        """Load tensors into the copy; `what` names their source in messages."""
        load_tensors(dict(self._model.named_parameters()), tensors, what=what)


class AdapterWeights:
    """Weights of a reference with LoRA: theta's model with an older adapter or none. There is no second model."""

    def __init__(self, model: Any, policy: LogprobModel) -> None:
        self.policy = policy
        self._layers = [module for module in model.modules() if is_adapted(module)]
        self._theta = trainable(model)
        self._tensors: dict[str, Tensor] | None = None
        """The adapter of the reference; None: the starting model, which has none."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make theta's model the reference while the context is open."""
        if self._tensors is not None:
            with exchanged(self._theta, self._tensors):
                yield
            return
        # peft's own switch, enable_adapters, also turns requires_grad off and on. A sharded model, whose parameters
        # exist twice, does not follow that. `forward` looks at this flag alone.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def reset_to_theta(self) -> None:
        """Replace the reference's adapter by a copy of theta's."""
        self._tensors = copied(self._theta)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the reference's adapter by parameter name; empty while the reference is the starting model."""
        return self._tensors or {}

    def load(self, tensors: Mapping[str, Tensor] | Mapping[str, TensorSlice], *, what: str) -> None:
        """Load the adapter of a reference that is not the starting model; `what` names its source in messages."""
        copies = copied(self._theta)
        load_tensors(copies, tensors, what=what)
        self._tensors = copies


ReferenceWeights = FrozenCopyWeights | AdapterWeights
"""Weights of the reference. While its context `active` is open, its `policy` computes log-probs under them."""
