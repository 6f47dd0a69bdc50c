"""One optimizer step in two halves: `gradients` computes them from a batch, `apply` touches the weights.

Between the halves the loop acks the batch: what is refused there costs one gradient and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.config import Recipe
from tba.errors import ConfigError
from tba.versions import PolicyVersion
from tba.wire import Batch
from tba_trainer.adapter_reference import AdapterReference
from tba_trainer.compiling import compile_layers
from tba_trainer.logprobs import LogprobModel
from tba_trainer.metrics import batch_metrics
from tba_trainer.model import load_tensors
from tba_trainer.objectives import resolve
from tba_trainer.optim import Optimizer
from tba_trainer.parameters import has_adapter, trainable, whole_tensors
from tba_trainer.passes import BatchPasses, Ranks
from tba_trainer.reference import make_reference
from tba_trainer.reference_weights import FrozenCopy, ReferenceWeights
from tba_trainer.trainer_state import TrainerState, decode_torch_rng
from tba_trainer.values import StepValues, scheduled

MODEL, OPTIMIZER, REFERENCE, REF_LOGPROBS = "model", "optimizer", "reference", "ref_logprobs"
"""Sections of a checkpoint."""


_RNG_STREAM = 0x7261
"""Keeps the trainer's random numbers apart from those of other services with the same seed."""


def trainer_rng(recipe: Recipe) -> np.random.Generator:
    """The trainer's random numbers as a run begins with them."""
    return np.random.default_rng([recipe.run.seed, _RNG_STREAM])


class Learner:
    """The policy with its optimizer, reference and random numbers.

    Args:
        model: theta, float32 master weights on `trainer.device`.
        rng: the run's random numbers of the trainer (`shuffle_rewards`); a checkpoint keeps its state.
        ranks: the processes that share every batch; all make the same calls with the same arguments.
    """

    def __init__(self, model: Any, recipe: Recipe, rng: np.random.Generator, *, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self.model = model
        self.rng = rng
        self._recipe = recipe
        autocast_dtype = torch.bfloat16 if recipe.trainer.compute_dtype == "bfloat16" else None
        self._policy = LogprobModel(model, temperature=recipe.model.policy_temperature, autocast_dtype=autocast_dtype)
        self.objective = resolve(recipe.objective)
        self.optimizer = Optimizer(model, recipe.trainer)
        if recipe.trainer.compile:
            compile_layers(model)
        self.reference = make_reference(
            self.objective,
            recipe,
            lambda: self._reference_weights(autocast_dtype),
            ranks,
        )

    def _reference_weights(self, autocast_dtype: torch.dtype | None) -> ReferenceWeights:
        if has_adapter(self.model):
            return AdapterReference(self.model, self._policy)
        temperature = self._recipe.model.policy_temperature
        return FrozenCopy.of(self.model, temperature=temperature, autocast_dtype=autocast_dtype)

    def gradients(
        self, batch: Batch, *, step: int, policy_ages: Sequence[int], values: StepValues | None = None
    ) -> dict[str, float | None]:
        """Gradients of one batch for optimizer step `step`; the weights stay as they are.

        Args:
            policy_ages: [N] of `batch.rollouts`, in optimizer steps.
            values: learning rate and beta of this step; None: as the recipe's schedules say.

        Returns:
            Metrics of the step. Loss and gradient norm may be NaN or infinite: then it must be skipped, not applied.
        """
        rollouts = batch.rollouts
        rewards = np.array([r.reward for r in rollouts], dtype=np.float64)
        if self._recipe.trainer.shuffle_rewards:
            rewards = self.rng.permutation(rewards)
        values = values or scheduled(self._recipe, step=step)
        work = BatchPasses(
            self._policy,
            self.objective,
            rollouts,
            rewards=rewards,
            ref_logprobs=self.reference.logprobs(rollouts),
            policy_ages=policy_ages,
            beta=values.beta,
            micro_batch_tokens=self._recipe.trainer.micro_batch_tokens,
            ranks=self._ranks,
        )
        self.optimizer.discard()
        sums = work.backward()
        grad_norm = self.optimizer.clip()
        measured = batch_metrics(
            work.scored(),
            success_reward=self._recipe.eval.success_reward,
            policy_temperature=self._recipe.model.policy_temperature,
            tasks_with_minimum=self._recipe.searcher.tasks_with_minimum,
        )
        return {
            **sums,
            **measured,
            "grad_norm": grad_norm,
            "learning_rate": values.learning_rate,
            "beta": values.beta,
        }

    def apply(self, *, step: int, lineage: int, values: StepValues | None = None) -> None:
        """Touch the weights; reset the reference where the preset says so."""
        values = values or scheduled(self._recipe, step=step)
        self.optimizer.apply(learning_rate=values.learning_rate)
        self.reference.after_step(PolicyVersion(lineage, step))

    def skip(self, *, step: int, lineage: int) -> None:
        """Step `step` happens without an update: the weights stay, what is due at this step of the run is done."""
        self.optimizer.discard()
        self.reference.after_step(PolicyVersion(lineage, step))

    def discard(self) -> None:
        """Drop the gradients at hand."""
        self.optimizer.discard()

    def load_weights(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """Put whole tensors, named as published, into theta; nothing else changes.

        Raises:
            ConfigError: theta is an adapter, which merged weights cannot be put into.
            TbaError: they are not those of this model.
        """
        if has_adapter(self.model):
            raise ConfigError(
                f"{what} has no checkpoint, and its weights are merged: with [model.lora] a run can only be forked "
                "from a version that has one (multiples of trainer.checkpoint_interval, and the last)"
            )
        load_tensors(dict(self.model.named_parameters()), tensors, what=what)

    def capture(self) -> Iterator[tuple[str, str, Tensor]]:
        """Everything that `restore` needs: section, name and whole tensor on the CPU, one at a time.

        Every process of a sharded model must exhaust the iterator, in step with the others.
        """
        for name, tensor in whole_tensors(trainable(self.model)):
            yield MODEL, name, tensor
        for name, tensor in self.optimizer.state_tensors():
            yield OPTIMIZER, name, tensor
        for name, tensor in self.reference.cache_tensors().items():
            yield REF_LOGPROBS, name, tensor
        if not self.reference.is_start:
            for name, tensor in self.reference.tensors():
                yield REFERENCE, name, tensor

    def restore(self, state: TrainerState, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put the learner where a checkpoint was taken.

        Raises:
            TbaError: the tensors are not those of this model.
        """
        what = f"checkpoint {state.version}"
        load_tensors(trainable(self.model), sections[MODEL], what=what)
        self.optimizer.load_state_tensors(sections.get(OPTIMIZER, {}))
        if REFERENCE in sections:
            self.reference.load(sections[REFERENCE], PolicyVersion.parse(state.reference_version))
        self.reference.load_cache(sections[REF_LOGPROBS])
        self.rng.bit_generator.state = state.rng
        torch.set_rng_state(decode_torch_rng(state.torch_rng))
