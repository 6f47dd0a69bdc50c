"""Forward and backward passes of one batch.

A_j may need log pi_theta of other rollouts at the current weights (of their group, for some objectives of the whole
batch). A group inside one micro-batch gets them from the forward pass that the gradient needs anyway; only groups that
span micro-batches cost a first pass without gradient. Both ways give the same gradient
(tests/unit/trainer/test_trainer_forward_backward.py).

A rollout that is masked, or whose A_j is 0 by rewards alone (as in a group of equal rewards, or below the baseline with
a `negative_weight` of 0), adds nothing to the gradient: where no A_j depends on theta, no pass is made for it. Nor is
one for a group of equal rewards that is masked as a whole (`mask_tied`) where no other group reads its log-probs.
Metrics of theta are of the others.

With several ranks each works on its own micro-batches of one plan. Every rank fills in the numbers of its rollouts and
leaves zeros for the others; a sum over the ranks completes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.wire import Rollout
from tba_trainer.learner.micro_batches import MicroBatch, plan_micro_batches
from tba_trainer.model.packing import PackedSequences, pack_sequences, response_sums, upload
from tba_trainer.objectives import (
    Objective,
    Sequences,
    Tokens,
    Totals,
    advantages,
    custom_loss,
    is_tied,
    log_ratios,
    objective_loss,
    second_moment_cut,
    tied_group_share,
)

_Found = tuple[dict[str, Float[Tensor, ""]], Float[Tensor, " b"]]
"""Of one micro-batch of b rollouts, in float64 on the device: its share of the metrics, and the mean weight of each
rollout's tokens."""
_FILLER = np.zeros(1, dtype=np.int32)
"""Prompt and response of the filler of an empty micro-batch."""


class Policy(Protocol):
    """theta at the policy temperature: a `LogprobModel`, or a test's substitute."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    def token_logprobs(self, sequences: PackedSequences) -> Float[Tensor, " T"]:
        """Return log pi of every response token, with gradient."""
        ...

    def logprobs_and_entropy(self, sequences: PackedSequences) -> tuple[Float[Tensor, " T"], Float[Tensor, ""]]:
        """Return the same, and the mean entropy of pi at some of the positions, in nats, without gradient."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is known of the N rollouts of a batch before theta has seen them; None where the objective needs none.

    Of a rollout that `unread_rows` has, anything may stand here: nothing reads it.
    """

    ref_logprobs: Sequence[float] | None = None
    """[N] log pi_ref, sums over the responses."""
    ref_token_logprobs: Sequence[NDArray[np.float64]] | None = None
    """The same per token, where the objective clamps tokens."""
    trainer_logprobs: Sequence[NDArray[np.float64]] | None = None
    """Log-probs per token of the policy that sampled, computed again by the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that share a batch; by default there is one."""

    rank: int = 0
    num_ranks: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda values: values
    """The sum of a float64 CPU tensor over all ranks, in every rank; called by all at the same points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Log-probs of one rollout from the forward pass: sums over the response, in nats."""

    rollout: Rollout
    policy_age: int
    logprob: float | None
    """None: no pass was made for it, since it adds nothing to the gradient."""
    ref_logprob: float | None
    """None where the objective needs no reference, or no pass was made."""
    abs_gap: float
    """Sum over tokens of |trainer log-prob - sampler log-prob|; 0 without a pass."""
    advantage: float | None = None
    """A_j; None: the objective has none."""
    weight: float | None = None
    """The mean of w_jt over the tokens; None: no pass was made, or the objective has no such weight."""


def tied_rows(objective: Objective, rewards: NDArray[np.float64], groups: Sequence[int]) -> NDArray[np.bool_]:
    """Return which rollouts the objective leaves out, since the rewards of their group are all equal. [N]"""
    if not objective.mask_tied:
        return np.zeros(len(rewards), dtype=np.bool_)
    return is_tied(torch.from_numpy(rewards), torch.tensor(groups)).numpy()


def unread_rows(objective: Objective, rewards: NDArray[np.float64], groups: Sequence[int]) -> NDArray[np.bool_]:
    """Return which rollouts no pass is made for, whatever theta is: those left out that no other depends on. [N]"""
    tied = tied_rows(objective, rewards, groups)
    return np.zeros_like(tied) if objective.needs_complete_batch else tied


class ForwardBackward:
    """Passes over N rollouts. Every rank gets the same arguments but `ranks.rank`.

    Args:
        policy: theta at the policy temperature.
        objective: gives A_j, the token weights and the denominator.
        rollouts: [N] the whole batch, whatever share of it this rank works on.
        groups: [N] group of each rollout, numbered from 0: its slot, so two slots of one prompt are two groups.
        rewards: [N] the rollouts' rewards, shuffled under `trainer.shuffle_rewards`.
        given: log-probs of other policies.
        policy_ages: [N] optimizer steps.
        beta: KL coefficient of this step.
        micro_batch_tokens: upper bound of the tokens of one pass.
        ranks: the processes that share the batch; None: this one alone.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        rollouts: Sequence[Rollout],
        *,
        groups: Sequence[int],
        rewards: NDArray[np.float64],
        given: Given,
        policy_ages: Sequence[int],
        beta: float,
        micro_batch_tokens: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._policy, self._objective, self._rollouts, self._beta = policy, objective, rollouts, beta
        self._ranks = ranks or Ranks()
        self._ages, self._given = list(policy_ages), given
        self._token_clamp = objective.parts.log_ratio_token_clamp or math.inf
        num_tokens = torch.tensor([len(r.response_tokens) for r in rollouts])
        # Rollouts that were cut off count in the baseline of their group, and nowhere else.
        truncated = [objective.mask_truncated and r.finish_reason == "length" for r in rollouts]
        self._kept = ~torch.tensor(truncated, dtype=torch.bool)  # [N]
        # the divisors of the loss are those of the whole batch: so the losses of micro-batches and ranks add up
        self._totals = Totals(
            num_rollouts=int(self._kept.sum()),
            num_tokens=int(num_tokens[self._kept].sum()),
            num_groups=len({group for group, is_cut in zip(groups, truncated, strict=True) if not is_cut}),
        )
        # after the divisors: the gradient is what it was without the part of these groups
        self._kept &= ~torch.from_numpy(tied_rows(objective, rewards, groups))
        self._unread = unread_rows(objective, rewards, groups)  # [N]
        self._sequences = self._given_sums(rewards, groups, num_tokens)
        self._advantage = torch.zeros(len(rollouts), dtype=torch.float64)
        self._weight = torch.zeros(len(rollouts), dtype=torch.float64)
        self._reward_advantage: Tensor | None = None
        """A_j where rewards alone decide it."""
        self._passed = self._rows_with_gradient()
        self._plan = plan_micro_batches(
            [len(rollouts[i].prompt_tokens) + len(rollouts[i].response_tokens) for i in self._passed],
            [groups[i] for i in self._passed],
            micro_batch_tokens,
            num_ranks=self._ranks.num_ranks,
            keep_groups=objective.needs_complete_groups,
        ).renumbered(self._passed)
        num_squares = int(num_tokens.sum()) if objective.needs_all_tokens else 0
        self._squares = torch.zeros(num_squares, dtype=torch.float64)
        """(log rho)^2 of every token of the batch, where the objective needs all of them."""
        self._logprob = torch.zeros(len(rollouts), dtype=torch.float64)
        self._abs_gap = torch.zeros(len(rollouts), dtype=torch.float64)

    def _given_sums(self, rewards: NDArray[np.float64], groups: Sequence[int], num_tokens: Tensor) -> Sequences:
        """Return the sequence sums without theta's, which the passes fill in."""
        # sums are small and many: they live on the CPU, in float64
        given, rollouts = self._given, self._rollouts
        behaviour = given.trainer_logprobs or [r.sampler_logprobs for r in rollouts]
        sampler_logprob = torch.tensor([values.sum(dtype=np.float64) for values in behaviour])
        ref_logprob = torch.tensor(given.ref_logprobs or [0.0] * len(rollouts), dtype=torch.float64)
        sampler_ref_log_ratio = sampler_logprob - ref_logprob
        if given.ref_token_logprobs is not None:
            differences = [a.astype(np.float64) - b for a, b in zip(behaviour, given.ref_token_logprobs, strict=True)]
            limit = self._token_clamp
            sampler_ref_log_ratio = torch.tensor([difference.clip(-limit, limit).sum() for difference in differences])
        self._ref_logprob = ref_logprob
        return Sequences(
            logprob=torch.zeros(len(rollouts), dtype=torch.float64),
            sampler_logprob=sampler_logprob,
            ref_log_ratio=torch.zeros(len(rollouts), dtype=torch.float64),
            sampler_ref_log_ratio=sampler_ref_log_ratio,
            reward=torch.tensor(rewards, dtype=torch.float64),
            policy_age=torch.tensor(self._ages),
            group=torch.tensor(groups),
            num_tokens=num_tokens,
        )

    def _rows_with_gradient(self) -> list[int]:
        """Return the rollouts that a pass is made for."""
        objective = self._objective
        # A_j depends on theta: it is known only after the pass
        if objective.reads_theta or objective.needs_all_tokens:
            # one that was cut off has its pass: the others of its group are centred by it
            return np.flatnonzero(~self._unread).tolist()
        self._reward_advantage = advantages(self._sequences, objective, beta=self._beta)
        return ((self._reward_advantage != 0) & self._kept).nonzero()[:, 0].tolist()

    def backward(self) -> dict[str, float | None]:
        """Accumulate the gradient of this rank's share of the batch; return the objective's metrics of the batch."""
        self._first_pass()
        micro_batches = self._plan.of_rank(self._ranks.rank)
        totals = self._read([self._micro_batch(each) for each in micro_batches], micro_batches)
        # One exchange for everything: each all_reduce waits for the slowest rank. The order of names must be the same
        # in all ranks, and so must the names: every rank has a micro-batch in every round.
        names = sorted(totals)
        sums = torch.tensor([totals[name] for name in names], dtype=torch.float64)  # [M]
        per_rollout = (self._logprob, self._abs_gap, self._advantage, self._weight)
        added = self._ranks.all_reduce(torch.cat([sums, *per_rollout]))  # [M + 4 N]
        sums, *completed = added.split([len(names), *map(len, per_rollout)])
        self._logprob, self._abs_gap, self._advantage, self._weight = completed
        found: dict[str, float | None] = dict(zip(names, sums.tolist(), strict=True))
        if not self._passed:
            found["entropy"] = None  # of a filler
        found["tied_group_share"] = tied_group_share(self._sequences.reward, self._sequences.group)
        found["num_rollouts_without_gradient"] = float(len(self._rollouts) - len(self._passed))
        return found

    def _read(self, found: Sequence[_Found], micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Fill in the weights that the micro-batches had, and return the sums of their metrics."""
        # not after each micro-batch: while the device is at its backward pass, the host prepares the next one
        vectors = [torch.cat([torch.stack([*metrics.values()]), weights]) for metrics, weights in found]  # [M + b] each
        values = torch.cat(vectors).cpu().split([len(vector) for vector in vectors])
        totals: dict[str, float] = {}
        for micro_batch, (metrics, weights), vector in zip(micro_batches, found, values, strict=True):
            of_metrics, of_rollouts = vector.split([len(metrics), len(weights)])
            self._weight[list(micro_batch.indices)] = of_rollouts
            for name, value in zip(metrics, of_metrics.tolist(), strict=True):
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def results(self) -> list[ForwardResult]:
        """Return what `backward` found of each rollout, in the order of the batch."""
        passed, refs, has_parts = set(self._passed), self._given.ref_logprobs, self._objective.function is None
        # complete also for rollouts without a pass
        advantage = self._advantage if self._reward_advantage is None else self._reward_advantage
        columns = [each.tolist() for each in (self._logprob, self._abs_gap, advantage, self._weight)]
        return [
            ForwardResult(
                rollout=self._rollouts[i],
                policy_age=self._ages[i],
                logprob=logprob if i in passed else None,
                ref_logprob=refs[i] if refs and i in passed else None,
                abs_gap=abs_gap,
                advantage=a if has_parts else None,
                weight=weight if has_parts and i in passed else None,
            )
            for i, (logprob, abs_gap, a, weight) in enumerate(zip(*columns, strict=True))
        ]

    @torch.no_grad()
    def _first_pass(self) -> None:
        """Compute the sequence sums of rollouts whose A_j needs rollouts outside their micro-batch."""
        if not self._objective.needs_complete_groups:
            return
        # with a single micro-batch its own forward pass is the whole batch
        everything = self._objective.needs_complete_batch and len(self._plan.rounds) * self._ranks.num_ranks > 1
        rounds = range(len(self._plan.rounds)) if everything else self._plan.split_rounds()
        if not rounds:
            return
        micro_batches = self._plan.of_rank(self._ranks.rank)
        for i in rounds:
            sequences = self._packed(micro_batches[i])
            self._put_sums(micro_batches[i], self._policy.token_logprobs(sequences), sequences)
        # one exchange for everything, as in `backward`
        mine = (self._sequences.logprob, self._sequences.ref_log_ratio, self._squares)
        added = self._ranks.all_reduce(torch.cat(mine))  # [2 N + T]
        for values, found in zip(mine, added.split([len(values) for values in mine]), strict=True):
            values.copy_(found)
        if everything:
            self._cut_second_moment()

    def _micro_batch(self, micro_batch: MicroBatch) -> _Found:
        """Run the forward and backward pass of one micro-batch; return what `_read` reads."""
        rows = list(micro_batch.indices)
        sequences = self._packed(micro_batch)
        logprobs, entropy = self._policy.logprobs_and_entropy(sequences)  # [T]
        # A_j is a constant of the loss (stopgrad in Eq. 5's A-form): its log-probs are detached before they are summed
        tokens = self._put_sums(micro_batch, logprobs, sequences)
        if self._objective.needs_all_tokens and len(self._plan.rounds) * self._ranks.num_ranks == 1:
            self._cut_second_moment()  # the first pass did it where there are several micro-batches
        self._logprob[rows] = self._sequences.logprob[rows]
        loss, metrics, weights = self._loss(tokens, rows)
        loss.backward()  # at once: the activations of one micro-batch are all that memory ever holds
        num_tokens = self._sequences.num_tokens
        share = int(num_tokens[rows].sum()) / max(1, int(num_tokens[self._passed].sum()))
        return {**metrics, "entropy": entropy.double() * share}, weights

    def _loss(
        self, tokens: Tokens, rows: list[int]
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor], Float[Tensor, " b"]]:
        """Return the share of the loss and metrics that the b rollouts `rows` of the batch have, and their weights."""
        # a group that is not complete here has its sums from the first pass, or needs none but its own
        if self._objective.function is not None:
            index = torch.tensor(rows, dtype=torch.long)
            found = custom_loss(tokens, index, self._sequences, self._objective, beta=self._beta, totals=self._totals)
            return *found, tokens.logprobs.new_zeros(len(rows), dtype=torch.float64)
        self._advantage[rows] = advantages(self._sequences, self._objective, beta=self._beta)[rows]
        padded = torch.zeros(tokens.num_rows, dtype=tokens.logprobs.dtype)  # [B]; the filler keeps advantage 0
        padded[: len(rows)] = self._advantage[rows].to(padded.dtype)
        on_device = upload(padded, tokens.logprobs.device)
        loss, metrics, weights = objective_loss(tokens, on_device, self._objective, totals=self._totals)
        return loss, metrics, weights[: len(rows)]

    def _cut_second_moment(self) -> None:
        """Choose the tokens that the weight `second_moment` masks."""
        if not self._objective.needs_all_tokens:
            return
        squares = self._squares[self._kept.repeat_interleave(self._sequences.num_tokens)]
        cut = second_moment_cut(squares)
        self._totals = replace(self._totals, max_second_moment=cut)

    def _put_sums(self, micro_batch: MicroBatch, logprobs: Float[Tensor, " T"], sequences: PackedSequences) -> Tokens:
        """Fill in what advantages and weights need of theta; return the tokens of the micro-batch."""
        rows, objective, found = list(micro_batch.indices), self._objective, logprobs.detach()
        tokens = self._tokens(rows, logprobs, sequences)
        summed = [found, (found - tokens.sampler_logprobs).abs()]
        if self._given.ref_token_logprobs is not None:
            ref = self._on_device(self._given.ref_token_logprobs, rows, logprobs)
            summed.append((found - ref).clamp(-self._token_clamp, self._token_clamp))
        columns = [response_sums(values, sequences)[: len(rows)] for values in summed]
        if objective.needs_all_tokens and rows:
            columns.append(log_ratios(tokens, objective).square())
        # one wait for the device
        on_cpu = torch.cat(columns).double().cpu().split([len(values) for values in columns])
        logprob, self._abs_gap[rows], *more = on_cpu
        self._sequences.logprob[rows] = logprob
        clamped = more.pop(0) if self._given.ref_token_logprobs is not None else logprob - self._ref_logprob[rows]
        self._sequences.ref_log_ratio[rows] = clamped
        if more:
            starts = self._sequences.num_tokens.cumsum(0) - self._sequences.num_tokens  # [N]
            lengths = self._sequences.num_tokens[rows]
            # the micro-batch's tokens lie rollout after rollout, as those of the batch do
            at = torch.cat([torch.arange(n) + s for s, n in zip(starts[rows].tolist(), lengths.tolist(), strict=True)])
            (self._squares[at],) = more
        return tokens

    def _tokens(self, rows: list[int], logprobs: Float[Tensor, " T"], sequences: PackedSequences) -> Tokens:
        sampler = [rollout.sampler_logprobs for rollout in self._rollouts]
        recomputed = self._given.trainer_logprobs
        prompts = [len(self._rollouts[i].prompt_tokens) for i in rows] or [len(_FILLER)]
        kept = self._kept[rows] if rows else torch.zeros(1, dtype=torch.bool)  # a filler teaches nothing
        return Tokens(
            logprobs=logprobs,
            sampler_logprobs=self._on_device(sampler, rows, logprobs),
            row=sequences.row,
            num_rows=sequences.num_rows,
            trainer_logprobs=None if recomputed is None else self._on_device(recomputed, rows, logprobs),
            num_prompt_tokens=upload(torch.tensor(prompts), logprobs.device),
            kept=None if bool(kept.all()) else upload(kept, logprobs.device),
        )

    def _on_device(self, values: Sequence[NDArray[Any]], rows: list[int], like: Float[Tensor, " T"]) -> Tensor:
        """Return the values of some rollouts, one after the other, as a tensor like another one. [T]"""
        joined = np.concatenate([values[i] for i in rows] or [_FILLER])
        return upload(torch.from_numpy(joined).to(like.dtype), like.device)

    def _packed(self, micro_batch: MicroBatch) -> PackedSequences:
        return pack_rollouts([self._rollouts[i] for i in micro_batch.indices], self._policy.device)


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> PackedSequences:
    """Pack rollouts for one pass; without any, return a filler of one token."""
    # an empty micro-batch is passed through the model all the same: the other ranks wait in the same collectives
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.response_tokens for r in rollouts]
    return pack_sequences(prompts or [_FILLER], responses or [_FILLER], device)
