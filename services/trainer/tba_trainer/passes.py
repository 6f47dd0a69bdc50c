"""The passes of one batch over the model.

A_j needs log pi_theta of the whole group at the current weights. A group inside one micro-batch gives it with the
forward pass that the gradient needs anyway; only groups that span micro-batches cost a first pass without gradient.
Both ways give the same gradient (tests/unit/test_trainer_learner.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.config import ObjectiveSection
from tba.wire import Rollout
from tba_trainer.logprobs import LogprobModel
from tba_trainer.metrics import ScoredRollout
from tba_trainer.microbatch import MicroBatch, PaddedSequences, pad_sequences, pad_values, plan_micro_batches
from tba_trainer.objective import ObjectiveInputs, Sequences, advantages, objective


class BatchPasses:
    """Forward and backward passes of N rollouts.

    Args:
        policy: theta at the policy temperature.
        rewards: [N]; what `shuffle_rewards` made of the rollouts' rewards.
        ref_logprobs: [N] sums over the responses.
        policy_ages: [N] optimizer steps.
        beta: KL coefficient of this step.
        micro_batch_tokens: most padded tokens of one pass.
    """

    def __init__(
        self,
        policy: LogprobModel,
        section: ObjectiveSection,
        rollouts: Sequence[Rollout],
        *,
        rewards: NDArray[np.float64],
        ref_logprobs: Sequence[float],
        policy_ages: Sequence[int],
        beta: float,
        micro_batch_tokens: int,
    ) -> None:
        self._policy, self._section, self._rollouts, self._beta = policy, section, rollouts, beta
        self._device = policy.device
        self._dtype = torch.promote_types(next(policy.model.parameters()).dtype, torch.float32)
        numbers = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(r.prompt_id for r in rollouts))}
        groups = [numbers[r.prompt_id] for r in rollouts]
        self._group = torch.tensor(groups, device=self._device)
        self._ages = list(policy_ages)
        self._age = torch.tensor(self._ages, device=self._device)
        self._reward = torch.tensor(rewards, dtype=self._dtype, device=self._device)
        self._ref_logprobs = list(ref_logprobs)
        self._ref = torch.tensor(self._ref_logprobs, dtype=self._dtype, device=self._device)
        lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts]
        self._plans = plan_micro_batches(lengths, groups, micro_batch_tokens)
        self._advantage = torch.zeros_like(self._reward)
        self._logprob = np.zeros(len(rollouts))
        self._abs_gap = np.zeros(len(rollouts))

    def backward(self) -> dict[str, float]:
        """Accumulate the gradient of the whole batch; returns the objective's metrics."""
        self._first_pass([plan for plan in self._plans if not plan.whole_groups])
        totals: dict[str, float] = {}
        for plan in self._plans:
            sequences, sampler_logprobs, rows = self._padded(plan)
            logprobs = self._policy.token_logprobs(sequences)
            inputs = ObjectiveInputs(
                logprobs=logprobs,
                sampler_logprobs=sampler_logprobs,
                ref_logprob=self._ref[rows],
                mask=sequences.mask,
                reward=self._reward[rows],
                policy_age=self._age[rows],
                group=self._group[rows],
                advantage=None if plan.whole_groups else self._advantage[rows],
            )
            loss, metrics = objective(inputs, self._section, beta=self._beta, num_rollouts=len(self._rollouts))
            loss.backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
            found, indices = logprobs.detach(), list(plan.indices)
            self._logprob[indices] = found.sum(dim=1).double().cpu().numpy()
            self._abs_gap[indices] = (found - sampler_logprobs).abs().sum(dim=1).double().cpu().numpy()
        return totals

    def scored(self) -> list[ScoredRollout]:
        """What `backward` found out, in the order of the batch."""
        return [
            ScoredRollout(rollout=rollout, policy_age=age, logprob=float(lp), ref_logprob=ref, abs_gap=float(gap))
            for rollout, age, lp, ref, gap in zip(
                self._rollouts, self._ages, self._logprob, self._ref_logprobs, self._abs_gap, strict=True
            )
        ]

    @torch.no_grad()
    def _first_pass(self, plans: Sequence[MicroBatch]) -> None:
        if not plans:
            return
        logprob, sampler_logprob = torch.zeros_like(self._reward), torch.zeros_like(self._reward)
        for plan in plans:
            sequences, sampler_logprobs, rows = self._padded(plan)
            logprob[rows] = self._policy.token_logprobs(sequences).sum(dim=1).to(self._dtype)
            sampler_logprob[rows] = sampler_logprobs.sum(dim=1)
        rows = torch.cat([self._rows(plan) for plan in plans])
        complete = Sequences(
            logprob=logprob[rows],
            sampler_logprob=sampler_logprob[rows],
            ref_logprob=self._ref[rows],
            reward=self._reward[rows],
            policy_age=self._age[rows],
            group=self._group[rows],
        )
        self._advantage[rows] = advantages(complete, self._section, beta=self._beta)

    def _rows(self, plan: MicroBatch) -> Tensor:
        return torch.tensor(plan.indices, device=self._device)

    def _padded(self, plan: MicroBatch) -> tuple[PaddedSequences, Float[Tensor, "B R"], Tensor]:
        chosen = [self._rollouts[i] for i in plan.indices]
        sequences = pad_sequences([r.prompt_tokens for r in chosen], [r.response_tokens for r in chosen], self._device)
        sampler = pad_values([r.sampler_logprobs for r in chosen], sequences.mask.shape[1], self._device)
        return sequences, sampler.to(self._dtype), self._rows(plan)
