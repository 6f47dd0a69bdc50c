"""One optimizer step in two halves: `gradients` computes them from a batch, `apply` touches the weights.

Between the halves the loop acks the batch: what is refused there costs one gradient and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tba.config import Recipe
from tba.errors import MalformedError
from tba.versions import PolicyVersion
from tba.wire import Batch, Rollout
from tba_trainer.logprobs import LogprobModel
from tba_trainer.metrics import batch_metrics
from tba_trainer.objective import preset_of
from tba_trainer.optim import NonFiniteError, Optimizer
from tba_trainer.passes import BatchPasses
from tba_trainer.reference import Reference
from tba_trainer.values import StepValues, scheduled


class Learner:
    """The policy with its optimizer, reference and random numbers.

    Args:
        model: theta, float32 master weights on `trainer.device`.
        rng: the run's random numbers of the trainer (`shuffle_rewards`); a checkpoint keeps its state.
    """

    def __init__(self, model: Any, recipe: Recipe, rng: np.random.Generator) -> None:
        self.model = model
        self.rng = rng
        self._recipe = recipe
        autocast_dtype = torch.bfloat16 if recipe.trainer.compute_dtype == "bfloat16" else None
        self._policy = LogprobModel(model, temperature=recipe.model.policy_temperature, autocast_dtype=autocast_dtype)
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.optimizer = Optimizer(model, recipe.trainer)
        self.reference = Reference(
            model,
            temperature=recipe.model.policy_temperature,
            autocast_dtype=autocast_dtype,
            micro_batch_tokens=recipe.trainer.micro_batch_tokens,
            max_cached=recipe.buffer.max_rollouts,
        )

    def gradients(
        self, batch: Batch, *, step: int, policy_ages: Sequence[int], values: StepValues | None = None
    ) -> dict[str, float | None]:
        """Gradients of one batch for optimizer step `step`; the weights stay as they are.

        Args:
            policy_ages: [N] of `batch.rollouts`, in optimizer steps.
            values: learning rate and beta of this step; None: as the recipe's schedules say.

        Returns:
            Metrics of the step.

        Raises:
            MalformedError: a rollout has no reward, a token outside the vocabulary, or is longer than the model reads.
            NonFiniteError: the loss or the gradient is NaN or infinite.
        """
        rollouts = batch.rollouts
        self._check(rollouts)
        rewards = np.array([r.reward for r in rollouts], dtype=np.float64)
        if self._recipe.trainer.shuffle_rewards:
            rewards = self.rng.permutation(rewards)
        values = values or scheduled(self._recipe, step=step)
        work = BatchPasses(
            self._policy,
            self._recipe.objective,
            rollouts,
            rewards=rewards,
            ref_logprobs=self.reference.logprobs(rollouts),
            policy_ages=policy_ages,
            beta=values.beta,
            micro_batch_tokens=self._recipe.trainer.micro_batch_tokens,
        )
        self.optimizer.discard()
        sums = work.backward()
        if not np.isfinite(sums["loss"]):
            raise NonFiniteError(
                f"the loss of step {step} is {sums['loss']}; the weights were not touched. Start a new run with a "
                "lower trainer.learning_rate or a larger objective.beta"
            )
        grad_norm = self.optimizer.clip(step=step)
        measured = batch_metrics(
            work.scored(),
            success_reward=self._recipe.eval.success_reward,
            policy_temperature=self._recipe.model.policy_temperature,
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
        resets = preset_of(self._recipe.objective).anchor == "reset"
        if resets and step % self._recipe.objective.reference_reset_steps == 0:
            self.reference.reset(self.model, PolicyVersion(lineage, step))

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            what = f"rollout {rollout.rollout_id.hex()} of prompt {rollout.prompt_id!r}"
            if rollout.reward is None:
                raise MalformedError(f"{what}: no reward (status {rollout.reward_status!r}); it cannot be trained on")
            highest = int(max(rollout.prompt_tokens.max(), rollout.response_tokens.max()))
            if highest >= self._vocab_size:
                raise MalformedError(
                    f"{what}: token id {highest} is outside the model's vocabulary of {self._vocab_size}; "
                    "searchers and trainer must use the same model"
                )
            num_tokens = len(rollout.prompt_tokens) + len(rollout.response_tokens)
            if self._max_positions is not None and num_tokens > self._max_positions:
                raise MalformedError(f"{what}: {num_tokens} tokens, the model reads {self._max_positions}")
