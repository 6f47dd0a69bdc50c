"""The passes of one batch over the model.

A_j may need log pi_theta of other rollouts at the current weights (their group's, for some objectives the whole
batch's). A group inside one micro-batch gives it with the forward pass that the gradient needs anyway; only groups that
span micro-batches cost a first pass without gradient. Both ways give the same gradient
(tests/unit/test_trainer_passes.py).

With several ranks each works on its own micro-batches of the one plan; what a rank finds out about its rollouts is
added up over all of them, with zeros for everybody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.wire import Rollout
from tba_trainer.metrics import ScoredRollout
from tba_trainer.objectives import Objective, Sequences, Tokens, Totals, advantages, objective_loss, tied_group_share
from tba_trainer.packing import PackedSequences, pack_sequences, response_sums
from tba_trainer.planning import MicroBatch, plan_micro_batches

_FILLER = np.zeros(1, dtype=np.int32)
"""Prompt and response of what stands in for an empty micro-batch. Its advantage is 0, but the pass must be made: the
other ranks wait in the same collectives."""


class Policy(Protocol):
    """theta at the policy temperature: a `LogprobModel`, or what a test puts in its place."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        ...

    def token_logprobs(self, sequences: PackedSequences) -> Float[Tensor, " T"]:
        """log pi of every response token, with gradient."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that share a batch; by default there is one."""

    rank: int = 0
    num_ranks: int = 1
    add_up: Callable[[Tensor], Tensor] = lambda values: values
    """The sum of a float64 CPU tensor over all ranks, in every rank; called by all at the same points."""


class BatchPasses:
    """Forward and backward passes of N rollouts. Every rank is given the same arguments but `ranks.rank`.

    Args:
        policy: theta at the policy temperature.
        rewards: [N]; what `shuffle_rewards` made of the rollouts' rewards.
        ref_logprobs: [N] sums over the responses; None where the objective needs no reference.
        policy_ages: [N] optimizer steps.
        beta: KL coefficient of this step.
        micro_batch_tokens: most tokens of one pass.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        rollouts: Sequence[Rollout],
        *,
        rewards: NDArray[np.float64],
        ref_logprobs: Sequence[float] | None,
        policy_ages: Sequence[int],
        beta: float,
        micro_batch_tokens: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._policy, self._objective, self._rollouts, self._beta = policy, objective, rollouts, beta
        self._ranks = ranks or Ranks()
        self._ages, self._ref_logprobs = list(policy_ages), ref_logprobs
        numbers = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(r.prompt_id for r in rollouts))}
        groups = [numbers[r.prompt_id] for r in rollouts]
        num_tokens = [len(r.response_tokens) for r in rollouts]
        self._totals = Totals(num_rollouts=len(rollouts), num_tokens=sum(num_tokens), num_groups=len(numbers))
        self._plan = plan_micro_batches(
            [len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts],
            groups,
            micro_batch_tokens,
            num_ranks=self._ranks.num_ranks,
            keep_groups=objective.needs_complete_groups,
        )
        # sums are small and many: they live on the CPU, in float64
        self._sequences = Sequences(
            logprob=torch.zeros(len(rollouts), dtype=torch.float64),
            sampler_logprob=torch.tensor([r.sampler_logprobs.sum(dtype=np.float64) for r in rollouts]),
            ref_logprob=torch.tensor(ref_logprobs or [0.0] * len(rollouts), dtype=torch.float64),
            reward=torch.tensor(rewards, dtype=torch.float64),
            policy_age=torch.tensor(self._ages),
            group=torch.tensor(groups),
            num_tokens=torch.tensor(num_tokens),
        )
        self._logprob = torch.zeros(len(rollouts), dtype=torch.float64)
        self._abs_gap = torch.zeros(len(rollouts), dtype=torch.float64)

    def backward(self) -> dict[str, float]:
        """Accumulate the gradient of this rank's share of the batch; returns the objective's metrics of all of it."""
        self._first_pass()
        totals: dict[str, float] = {}
        for micro_batch in self._plan.of_rank(self._ranks.rank):
            for name, value in self._micro_batch(micro_batch).items():
                totals[name] = totals.get(name, 0.0) + value
        names = sorted(totals)
        sums = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        added = self._ranks.add_up(torch.cat([sums, self._logprob, self._abs_gap]))
        sums, self._logprob, self._abs_gap = added.split([len(names), len(self._rollouts), len(self._rollouts)])
        tied = tied_group_share(self._sequences.reward, self._sequences.group)
        return {**dict(zip(names, sums.tolist(), strict=True)), "tied_group_share": tied}

    def scored(self) -> list[ScoredRollout]:
        """What `backward` found out, in the order of the batch."""
        refs: Sequence[float | None] = self._ref_logprobs or [None] * len(self._rollouts)
        found = zip(self._rollouts, self._ages, self._logprob.tolist(), refs, self._abs_gap.tolist(), strict=True)
        return [
            ScoredRollout(rollout=rollout, policy_age=age, logprob=logprob, ref_logprob=ref, abs_gap=abs_gap)
            for rollout, age, logprob, ref, abs_gap in found
        ]

    @torch.no_grad()
    def _first_pass(self) -> None:
        """Sequence sums of the rollouts whose A_j needs other rollouts than those of their micro-batch."""
        if not self._objective.needs_complete_groups:
            return
        everything = self._objective.needs_complete_batch and len(self._plan.rounds) * self._ranks.num_ranks > 1
        rounds = range(len(self._plan.rounds)) if everything else self._plan.split_rounds()
        if not rounds:
            return
        micro_batches = self._plan.of_rank(self._ranks.rank)
        for i in rounds:
            sequences = self._packed(micro_batches[i])
            self._put_sums(micro_batches[i], self._policy.token_logprobs(sequences), sequences)
        self._sequences.logprob.copy_(self._ranks.add_up(self._sequences.logprob))

    def _micro_batch(self, micro_batch: MicroBatch) -> dict[str, float]:
        """Forward and backward pass of one micro-batch; returns its share of the metrics."""
        rows = list(micro_batch.indices)
        sequences = self._packed(micro_batch)
        logprobs = self._policy.token_logprobs(sequences)  # [T]
        self._put_sums(micro_batch, logprobs.detach(), sequences)
        sampler = np.concatenate([self._rollouts[i].sampler_logprobs for i in rows] or [_FILLER])
        sampler_logprobs = torch.from_numpy(sampler).to(device=logprobs.device, dtype=logprobs.dtype)  # [T]
        gaps = response_sums((logprobs.detach() - sampler_logprobs).abs(), sequences)  # [B]
        self._logprob[rows] = self._sequences.logprob[rows]
        self._abs_gap[rows] = gaps[: len(rows)].double().cpu()
        # a group that is not whole in here has its sums from the first pass, or needs none but its own
        advantage = advantages(self._sequences, self._objective, beta=self._beta)[rows]
        tokens = Tokens(
            logprobs=logprobs, sampler_logprobs=sampler_logprobs, row=sequences.row, num_rows=sequences.num_rows
        )
        of_rows = logprobs.new_zeros(sequences.num_rows)  # [B]; the filler keeps 0
        of_rows[: len(rows)] = advantage.to(of_rows)
        loss, metrics = objective_loss(tokens, of_rows, self._objective, totals=self._totals)
        loss.backward()
        return metrics

    def _put_sums(self, micro_batch: MicroBatch, logprobs: Float[Tensor, " T"], sequences: PackedSequences) -> None:
        rows = list(micro_batch.indices)
        self._sequences.logprob[rows] = response_sums(logprobs, sequences)[: len(rows)].double().cpu()

    def _packed(self, micro_batch: MicroBatch) -> PackedSequences:
        return packed_rollouts([self._rollouts[i] for i in micro_batch.indices], self._policy.device)


def packed_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> PackedSequences:
    """The sequences of some rollouts; without any, a filler of one token, so that every rank makes a pass."""
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.response_tokens for r in rollouts]
    return pack_sequences(prompts or [_FILLER], responses or [_FILLER], device)
