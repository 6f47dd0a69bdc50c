"""Forward and backward passes of one batch, and the metrics of what they found.

A_j may need log pi_theta of other rollouts at the current weights (of their group, for some objectives of the whole
batch). A group inside one micro-batch gets them from the forward pass that the gradient needs anyway; only groups that
span micro-batches cost a first pass without gradient. Both ways give the same gradient
(tests/unit/trainer/test_trainer_forward_backward.py).

With several ranks each works on its own micro-batches of one plan. Every rank fills in the numbers of its rollouts and
leaves zeros for the others; a sum over the ranks completes them.

ESS collapse and growth of the gradient norm announce divergence before the reward falls (arXiv 2602.17616). The metrics
of the behaviour policy are also taken per policy age, because old data collapses first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.wire import Rollout
from tba_trainer.model.packing import PackedSequences, pack_sequences, response_sums
from tba_trainer.objectives import (
    Objective,
    Sequences,
    Tokens,
    Totals,
    advantages,
    custom_loss,
    objective_loss,
    tied_group_share,
)

FIRST_PASS_COST = 1 / 3
"""A pass without gradient, as a share of one with: forward against forward and backward."""
_FILLER = np.zeros(1, dtype=np.int32)
"""Prompt and response of the filler of an empty micro-batch."""


AGE_BUCKETS = ((0, 0), (1, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))
"""First and last policy age of each bucket, in optimizer steps; None: no end."""


class Policy(Protocol):
    """theta at the policy temperature: a `LogprobModel`, or a test's substitute."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    def token_logprobs(self, sequences: PackedSequences) -> Float[Tensor, " T"]:
        """Return log pi of every response token, with gradient."""
        ...


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
    logprob: float
    ref_logprob: float | None
    """None where the objective needs no reference."""
    abs_gap: float
    """Sum over tokens of |trainer log-prob - sampler log-prob|."""


class ForwardBackward:
    """Passes over N rollouts. Every rank gets the same arguments but `ranks.rank`.

    Args:
        policy: theta at the policy temperature.
        objective: gives A_j, the token weights and the denominator.
        rollouts: [N] the whole batch, whatever share of it this rank works on.
        rewards: [N] the rollouts' rewards, shuffled under `trainer.shuffle_rewards`.
        ref_logprobs: [N] sums over the responses; None where the objective needs no reference.
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
        # the denominators of the loss are those of the whole batch: so the losses of micro-batches and ranks add up
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
        """Accumulate the gradient of this rank's share of the batch; return the objective's metrics of the batch."""
        self._first_pass()
        totals: dict[str, float] = {}
        for micro_batch in self._plan.of_rank(self._ranks.rank):
            for name, value in self._micro_batch(micro_batch).items():
                totals[name] = totals.get(name, 0.0) + value
        # One exchange for everything: each all_reduce waits for the slowest rank. The order of names must be the same
        # in all ranks, and so must the names: every rank has a micro-batch in every round.
        names = sorted(totals)
        sums = torch.tensor([totals[name] for name in names], dtype=torch.float64)  # [M]
        added = self._ranks.all_reduce(torch.cat([sums, self._logprob, self._abs_gap]))  # [M + 2 N]
        sums, self._logprob, self._abs_gap = added.split([len(names), len(self._rollouts), len(self._rollouts)])
        tied = tied_group_share(self._sequences.reward, self._sequences.group)
        return {**dict(zip(names, sums.tolist(), strict=True)), "tied_group_share": tied}

    def results(self) -> list[ForwardResult]:
        """Return the log-probs that `backward` computed, in the order of the batch."""
        refs: Sequence[float | None] = self._ref_logprobs or [None] * len(self._rollouts)
        rows = zip(self._rollouts, self._ages, self._logprob.tolist(), refs, self._abs_gap.tolist(), strict=True)
        return [
            ForwardResult(rollout=rollout, policy_age=age, logprob=logprob, ref_logprob=ref, abs_gap=abs_gap)
            for rollout, age, logprob, ref, abs_gap in rows
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
        self._sequences.logprob.copy_(self._ranks.all_reduce(self._sequences.logprob))

    def _micro_batch(self, micro_batch: MicroBatch) -> dict[str, float]:
        """Run the forward and backward pass of one micro-batch; return its share of the metrics."""
        rows = list(micro_batch.indices)
        sequences = self._packed(micro_batch)
        logprobs = self._policy.token_logprobs(sequences)  # [T]
        # A_j is a constant of the loss (stopgrad in Eq. 5's A-form): its log-probs are detached before they are summed
        self._put_sums(micro_batch, logprobs.detach(), sequences)
        sampler = np.concatenate([self._rollouts[i].sampler_logprobs for i in rows] or [_FILLER])
        sampler_logprobs = torch.from_numpy(sampler).to(device=logprobs.device, dtype=logprobs.dtype)  # [T]
        gaps = response_sums((logprobs.detach() - sampler_logprobs).abs(), sequences)  # [B]
        self._logprob[rows] = self._sequences.logprob[rows]
        # at policy age 0 this should be rounding alone: metric `logprob_gap_on_policy`
        self._abs_gap[rows] = gaps[: len(rows)].double().cpu()
        tokens = Tokens(
            logprobs=logprobs, sampler_logprobs=sampler_logprobs, row=sequences.row, num_rows=sequences.num_rows
        )
        loss, metrics = self._loss(tokens, rows)
        loss.backward()  # at once: the activations of one micro-batch are all that memory ever holds
        return metrics

    def _loss(self, tokens: Tokens, rows: list[int]) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """Return the share of the loss and metrics that the rollouts `rows` of the batch have."""
        # a group that is not complete here has its sums from the first pass, or needs none but its own
        if self._objective.function is not None:
            index = torch.tensor(rows, dtype=torch.long)
            return custom_loss(tokens, index, self._sequences, self._objective, beta=self._beta, totals=self._totals)
        advantage = advantages(self._sequences, self._objective, beta=self._beta)[rows]
        padded = tokens.logprobs.new_zeros(tokens.num_rows)  # [B]; the filler keeps advantage 0
        padded[: len(rows)] = advantage.to(padded)
        return objective_loss(tokens, padded, self._objective, totals=self._totals)

    def _put_sums(self, micro_batch: MicroBatch, logprobs: Float[Tensor, " T"], sequences: PackedSequences) -> None:
        rows = list(micro_batch.indices)
        self._sequences.logprob[rows] = response_sums(logprobs, sequences)[: len(rows)].double().cpu()

    def _packed(self, micro_batch: MicroBatch) -> PackedSequences:
        return pack_rollouts([self._rollouts[i] for i in micro_batch.indices], self._policy.device)


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> PackedSequences:
    """Pack rollouts for one pass; without any, return a filler of one token."""
    # an empty micro-batch is passed through the model all the same: the other ranks wait in the same collectives
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.response_tokens for r in rollouts]
    return pack_sequences(prompts or [_FILLER], responses or [_FILLER], device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rollouts of one forward and backward pass, as positions in the batch; may be empty."""

    indices: tuple[int, ...]
    whole_groups: bool
    """True when every group in it is complete: then one forward pass gives its statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The micro-batches of every rank."""

    rounds: tuple[tuple[MicroBatch, ...], ...]
    """[num_micro_batches][num_ranks]; the ranks work on the micro-batches of a round at the same time."""

    def of_rank(self, rank: int) -> list[MicroBatch]:
        """Return the micro-batches of one rank, one per round."""
        return [micro_batches[rank] for micro_batches in self.rounds]

    def split_rounds(self) -> list[int]:
        """Return the rounds in which some rank has an incomplete group."""
        return [i for i, micro_batches in enumerate(self.rounds) if not all(m.whole_groups for m in micro_batches)]


def plan_micro_batches(
    lengths: Sequence[int],
    groups: Sequence[int],
    max_tokens: int,
    *,
    num_ranks: int = 1,
    keep_groups: bool = True,
) -> Plan:
    """Distribute N rollouts over micro-batches of at most `max_tokens`, all with about the same number of tokens.

    A rollout longer than `max_tokens` gets a micro-batch of its own. A pure function of lengths and groups: every rank
    computes the plan of all. All ranks get the same number of micro-batches, some of them empty where rollouts are few,
    because every pass of a sharded model is a collective.

    Args:
        lengths: [N] prompt plus response tokens.
        groups: [N] group number of each rollout.
        max_tokens: of one micro-batch.
        num_ranks: processes that share the batch.
        keep_groups: keep a group in one micro-batch where it fits, so that it needs no first pass; False where no
            advantage depends on theta's log-probs of other rollouts.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    single = _pack([(i,) for i in range(len(lengths))], lengths, max_tokens, num_ranks)
    plan = _plan(single, lengths, members, num_ranks)
    if not keep_groups:
        return plan
    items: list[tuple[int, ...]] = []
    for indices in members.values():
        whole = sum(lengths[i] for i in indices) <= max_tokens
        items.extend([tuple(indices)] if whole else [(i,) for i in indices])
    kept = _plan(_pack(items, lengths, max_tokens, num_ranks), lengths, members, num_ranks)
    # groups are split all the same where ranks would else wait for each other longer than the first pass takes
    return min(kept, plan, key=lambda p: _cost(p, lengths))


def _pack(items: Sequence[tuple[int, ...]], lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Return bins of rollouts, in a multiple of `num_ranks`: the largest item first, each into the emptiest bin."""
    sizes = {item: sum(lengths[i] for i in item) for item in items}
    order = sorted(items, key=lambda item: (-sizes[item], item))
    # an item longer than a bin fills one bin, no more
    num_tokens = sum(min(size, max_tokens) for size in sizes.values())
    # -(-a // b) is a / b, rounded up. No fewer bins can hold that many tokens; more are tried where they do not fit.
    num_bins = num_ranks * max(1, -(-num_tokens // (max_tokens * num_ranks)))
    while True:  # with one more bin per rank each time, until everything fits
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for item in order:
            emptiest = min(range(num_bins), key=loads.__getitem__)
            if loads[emptiest] and loads[emptiest] + sizes[item] > max_tokens:
                break
            bins[emptiest].extend(item)
            loads[emptiest] += sizes[item]
        else:
            return bins
        num_bins += num_ranks


def _plan(bins: Sequence[list[int]], lengths: Sequence[int], members: dict[int, list[int]], num_ranks: int) -> Plan:
    """Put bins of about the same load into one round."""
    # the largest first: a micro-batch that does not fit into memory then fails at once
    by_load = sorted(bins, key=lambda indices: (-sum(lengths[i] for i in indices), indices))
    group_of = {i: group for group, indices in members.items() for i in indices}

    def micro_batch(indices: list[int]) -> MicroBatch:
        here = {group_of[i] for i in indices}
        whole = sum(len(members[group]) for group in here) == len(indices)
        return MicroBatch(indices=tuple(sorted(indices)), whole_groups=whole)

    micro_batches = [micro_batch(indices) for indices in by_load]
    return Plan(
        rounds=tuple(
            tuple(micro_batches[start : start + num_ranks]) for start in range(0, len(micro_batches), num_ranks)
        )
    )


def _cost(plan: Plan, lengths: Sequence[int]) -> float:
    """Return the token passes until the slowest rank is done with every round."""
    rounds = [max(sum(lengths[i] for i in m.indices) for m in micro_batches) for micro_batches in plan.rounds]
    return sum(rounds) + FIRST_PASS_COST * sum(rounds[i] for i in plan.split_rounds())


def ess_ratio(log_weights: NDArray[np.float64]) -> float | None:
    """Return the effective sample size of importance weights per weight, (sum w)^2 / (N sum w^2), in (0, 1].

    None: a weight is NaN or infinite.
    """
    if not np.isfinite(log_weights).all():
        return None
    # Kish's effective sample size: 1 / N where one rollout rules the batch, 1 where all weigh the same.
    weights = np.exp(log_weights - log_weights.max())  # a common factor cancels, and exp cannot overflow
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def bucket_name(policy_age: int) -> str:
    """Return the bucket of a policy age as a part of metric names: `0`, `1_2`, ..., `33_up`."""
    first, last = next(bucket for bucket in reversed(AGE_BUCKETS) if policy_age >= bucket[0])
    return f"{first}_up" if last is None else str(first) if first == last else f"{first}_{last}"


def age_metrics(scored: Sequence[ForwardResult]) -> dict[str, float | None]:
    """Return metrics per bucket B of policy ages that occur.

    `ess_age_B`, `log_ratio_mean_age_B` (nats per rollout), `log_ratio_token_abs_age_B` (mean |trainer - sampler
    log-prob| of a token, nats) and `num_rollouts_age_B`.
    """
    buckets: dict[str, list[ForwardResult]] = {}
    for item in sorted(scored, key=lambda item: item.policy_age):
        buckets.setdefault(bucket_name(max(0, item.policy_age)), []).append(item)
    metrics: dict[str, float | None] = {}
    for name, items in buckets.items():
        log_ratio = _log_ratios(items)
        metrics[f"ess_age_{name}"] = ess_ratio(log_ratio)
        metrics[f"log_ratio_mean_age_{name}"] = _known(log_ratio.mean())
        metrics[f"log_ratio_token_abs_age_{name}"] = _known(sum(item.abs_gap for item in items) / _num_tokens(items))
        metrics[f"num_rollouts_age_{name}"] = float(len(items))
    return metrics


def batch_metrics(
    scored: Sequence[ForwardResult],
    *,
    success_reward: float,
    policy_temperature: float,
    tasks_with_minimum: Collection[str] = (),
) -> dict[str, float | None]:
    """Return the metrics of one batch, taken at theta before the update.

    `logprob_gap_on_policy` is the mean |trainer - sampler log-prob| per token over rollouts of policy age 0 that were
    sampled from the whole distribution at the policy temperature; None without such rollouts.

    Args:
        scored: the rollouts of the batch, at least one.
        success_reward: a reward from which on a rollout counts as a success.
        policy_temperature: what theta's logits are divided by.
        tasks_with_minimum: tasks with a minimum length, below which searchers cannot sample end of sequence.
    """
    rewards = np.array([s.rollout.reward for s in scored], dtype=np.float64)
    ages = np.array([s.policy_age for s in scored])
    log_ratio = _log_ratios(scored)
    # for these rollouts trainer and sampler must agree: the same weights, the same distribution
    on_policy = [
        s
        for s in scored
        if s.policy_age == 0 and s.rollout.task not in tasks_with_minimum and _is_policy(s.rollout, policy_temperature)
    ]
    gap = _known(sum(s.abs_gap for s in on_policy) / _num_tokens(on_policy)) if on_policy else None
    return {
        "reward_mean": float(rewards.mean()),
        "accuracy": float((rewards >= success_reward).mean()),
        "policy_age_mean": float(ages.mean()),
        "policy_age_max": float(ages.max()),
        "ess": ess_ratio(log_ratio),
        "log_ratio_mean": _known(log_ratio.mean()),
        "log_ratio_token_mean": _known(log_ratio.sum() / _num_tokens(scored)),
        "kl_to_ref": _kl_to_ref(scored),
        "logprob_gap_on_policy": gap,
        "num_rollouts": float(len(scored)),
        "num_tokens": float(_num_tokens(scored)),
        "num_unique_rollouts": float(len({s.rollout.response_tokens.tobytes() for s in scored})),
        **age_metrics(scored),
    }


def _log_ratios(scored: Sequence[ForwardResult]) -> NDArray[np.float64]:
    """Return log pi_theta - log pi_behaviour of every rollout, in nats. [N]"""
    return np.array([s.logprob - float(s.rollout.sampler_logprobs.sum(dtype=np.float64)) for s in scored])


def _kl_to_ref(scored: Sequence[ForwardResult]) -> float | None:
    differences = [s.logprob - s.ref_logprob for s in scored if s.ref_logprob is not None]
    return _known(np.mean(differences)) if len(differences) == len(scored) else None


def _num_tokens(scored: Sequence[ForwardResult]) -> int:
    return sum(len(s.rollout.response_tokens) for s in scored)


def _known(value: float | np.floating) -> float | None:
    """Return a finite number, or None for any other."""
    return float(value) if math.isfinite(value) else None


def _is_policy(rollout: Rollout, policy_temperature: float) -> bool:
    sampling = rollout.sampling
    return sampling.temperature == policy_temperature and sampling.top_p == 1.0 and sampling.top_k == 0
