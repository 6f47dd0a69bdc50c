"""Forward and backward passes of one batch, and the metrics of what they found.

A_j may need log pi_theta of other rollouts at the current weights (of their group, for some objectives of the whole
batch). A group inside one micro-batch gets them from the forward pass that the gradient needs anyway; only groups that
span micro-batches cost a first pass without gradient. Both ways give the same gradient
(tests/unit/trainer/test_trainer_forward_backward.py).

A rollout that is masked, or whose A_j is 0 by rewards alone (as in a group of equal rewards), adds nothing to the
gradient: where no A_j depends on theta, no pass is made for it. Metrics of theta are of the others.

With several ranks each works on its own micro-batches of one plan. Every rank fills in the numbers of its rollouts and
leaves zeros for the others; a sum over the ranks completes them.

ESS collapse and growth of the gradient norm announce divergence before the reward falls (arXiv 2602.17616). The metrics
of the behaviour policy are also taken per policy age, because old data collapses first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.wire import Rollout
from tba_trainer.learner.micro_batches import MicroBatch, plan_micro_batches
from tba_trainer.model.packing import PackedSequences, pack_sequences, response_sums
from tba_trainer.objectives import (
    Objective,
    Sequences,
    Tokens,
    Totals,
    advantages,
    custom_loss,
    log_ratios,
    log_z_of_batch,
    objective_loss,
    second_moment_cut,
    tied_group_share,
)

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

    def logprobs_and_entropy(self, sequences: PackedSequences) -> tuple[Float[Tensor, " T"], Float[Tensor, ""]]:
        """Return the same, and the mean entropy of pi at some of the positions, in nats, without gradient."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is known of the N rollouts of a batch before theta has seen them; None where the objective needs none."""

    ref_logprobs: Sequence[float] | None = None
    """[N] log pi_ref, sums over the responses."""
    ref_token_logprobs: Sequence[NDArray[np.float64]] | None = None
    """The same per token, where the objective clamps tokens."""
    trainer_logprobs: Sequence[NDArray[np.float64]] | None = None
    """Log-probs per token of the policy that sampled, computed again by the trainer."""
    log_z: Sequence[float] | None = None
    """[N] beta log Z of the prompts; NaN: not known yet."""


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
    """None where the objective needs no reference."""
    abs_gap: float
    """Sum over tokens of |trainer log-prob - sampler log-prob|; 0 without a pass."""
    advantage: float | None = None
    """A_j; None: the objective has none."""
    weight: float | None = None
    """The mean of w_jt over the tokens; None: no pass was made, or the objective has no such weight."""


class ForwardBackward:
    """Passes over N rollouts. Every rank gets the same arguments but `ranks.rank`.

    Args:
        policy: theta at the policy temperature.
        objective: gives A_j, the token weights and the denominator.
        rollouts: [N] the whole batch, whatever share of it this rank works on.
        groups: [N] group of each rollout, numbered from 0: its slot, so two slots of one prompt are two groups.
        rewards: [N] the rollouts' rewards, shuffled under `trainer.shuffle_rewards`.
        given: log-probs of other policies, and log Z.
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
            log_z=None if given.log_z is None else torch.tensor(given.log_z, dtype=torch.float64),
        )

    def _rows_with_gradient(self) -> list[int]:
        """Return the rollouts that a pass is made for."""
        everything, objective = list(range(len(self._rollouts))), self._objective
        # A_j, or the gradient beside it, depends on theta: it is known only after the pass
        if objective.reads_theta or objective.needs_all_tokens or objective.log_ratio_penalty:
            return everything
        self._reward_advantage = advantages(self._sequences, objective, beta=self._beta)
        return ((self._reward_advantage != 0) & self._kept).nonzero()[:, 0].tolist()

    def backward(self) -> dict[str, float | None]:
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
                ref_logprob=None if not refs else refs[i],
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

    def _micro_batch(self, micro_batch: MicroBatch) -> dict[str, float]:
        """Run the forward and backward pass of one micro-batch; return its share of the metrics."""
        rows = list(micro_batch.indices)
        sequences = self._packed(micro_batch)
        logprobs, entropy = self._policy.logprobs_and_entropy(sequences)  # [T]
        # A_j is a constant of the loss (stopgrad in Eq. 5's A-form): its log-probs are detached before they are summed
        tokens = self._put_sums(micro_batch, logprobs, sequences)
        if self._objective.needs_all_tokens and len(self._plan.rounds) * self._ranks.num_ranks == 1:
            self._cut_second_moment()  # the first pass did it where there are several micro-batches
        gaps = response_sums((logprobs.detach() - tokens.sampler_logprobs).abs(), sequences)  # [B]
        self._logprob[rows] = self._sequences.logprob[rows]
        # at policy age 0 this should be rounding alone: metric `logprob_gap_on_policy`
        self._abs_gap[rows] = gaps[: len(rows)].double().cpu()
        loss, metrics = self._loss(tokens, rows)
        loss.backward()  # at once: the activations of one micro-batch are all that memory ever holds
        num_tokens = self._sequences.num_tokens
        share = int(num_tokens[rows].sum()) / max(1, int(num_tokens[self._passed].sum()))
        return {**metrics, "entropy": float(entropy) * share}

    def _loss(self, tokens: Tokens, rows: list[int]) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """Return the share of the loss and metrics that the rollouts `rows` of the batch have."""
        # a group that is not complete here has its sums from the first pass, or needs none but its own
        if self._objective.function is not None:
            index = torch.tensor(rows, dtype=torch.long)
            return custom_loss(tokens, index, self._sequences, self._objective, beta=self._beta, totals=self._totals)
        self._advantage[rows] = advantages(self._sequences, self._objective, beta=self._beta)[rows]
        padded = tokens.logprobs.new_zeros(tokens.num_rows)  # [B]; the filler keeps advantage 0
        padded[: len(rows)] = self._advantage[rows].to(padded)
        loss, metrics, weights = objective_loss(tokens, padded, self._objective, totals=self._totals)
        self._weight[rows] = torch.tensor(weights[: len(rows)], dtype=torch.float64)
        return loss, metrics

    def log_z(self) -> list[float]:
        """Return this batch's estimate of beta log Z of every rollout's prompt, after `backward`. [N]"""
        ratio = self._logprob - self._ref_logprob
        sequences = replace(self._sequences, logprob=self._logprob, ref_log_ratio=ratio)
        return log_z_of_batch(sequences, self._objective, self._beta).tolist()

    def _cut_second_moment(self) -> None:
        """Choose the tokens that the weight `second_moment` masks."""
        if not self._objective.needs_all_tokens:
            return
        squares = self._squares[self._kept.repeat_interleave(self._sequences.num_tokens)]
        cut = second_moment_cut(squares, self._objective.second_moment_limit)
        self._totals = replace(self._totals, max_second_moment=cut)

    def _put_sums(self, micro_batch: MicroBatch, logprobs: Float[Tensor, " T"], sequences: PackedSequences) -> Tokens:
        """Fill in what advantages and weights need of theta; return the tokens of the micro-batch."""
        rows, objective, found = list(micro_batch.indices), self._objective, logprobs.detach()
        tokens = self._tokens(rows, logprobs, sequences)
        self._sequences.logprob[rows] = response_sums(found, sequences)[: len(rows)].double().cpu()
        self._sequences.ref_log_ratio[rows] = self._sequences.logprob[rows] - self._ref_logprob[rows]
        if self._given.ref_token_logprobs is not None:
            ref = self._on_device(self._given.ref_token_logprobs, rows, logprobs)
            clamped = response_sums((found - ref).clamp(-self._token_clamp, self._token_clamp), sequences)  # [B]
            self._sequences.ref_log_ratio[rows] = clamped[: len(rows)].double().cpu()
        if objective.needs_all_tokens and rows:
            starts = self._sequences.num_tokens.cumsum(0) - self._sequences.num_tokens  # [N]
            lengths = self._sequences.num_tokens[rows]
            # the micro-batch's tokens lie rollout after rollout, as those of the batch do
            at = torch.cat([torch.arange(n) + s for s, n in zip(starts[rows].tolist(), lengths.tolist(), strict=True)])
            self._squares[at] = log_ratios(tokens, objective)[0].square().double().cpu()
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
            num_prompt_tokens=torch.tensor(prompts, device=logprobs.device),
            kept=None if bool(kept.all()) else kept.to(logprobs.device),
        )

    def _on_device(self, values: Sequence[NDArray[Any]], rows: list[int], like: Float[Tensor, " T"]) -> Tensor:
        """Return the values of some rollouts, one after the other, as a tensor like another one. [T]"""
        joined = np.concatenate([values[i] for i in rows] or [_FILLER])
        return torch.from_numpy(joined).to(device=like.device, dtype=like.dtype)

    def _packed(self, micro_batch: MicroBatch) -> PackedSequences:
        return pack_rollouts([self._rollouts[i] for i in micro_batch.indices], self._policy.device)


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> PackedSequences:
    """Pack rollouts for one pass; without any, return a filler of one token."""
    # an empty micro-batch is passed through the model all the same: the other ranks wait in the same collectives
    prompts, responses = [r.prompt_tokens for r in rollouts], [r.response_tokens for r in rollouts]
    return pack_sequences(prompts or [_FILLER], responses or [_FILLER], device)


def ess_ratio(log_weights: NDArray[np.float64]) -> float | None:
    """Return the effective sample size of importance weights per weight, (sum w)^2 / (N sum w^2), in (0, 1].

    None: a weight is NaN or infinite, or there is none.
    """
    if not len(log_weights) or not np.isfinite(log_weights).all():
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

    `ess_age_B`, `log_ratio_mean_age_B` (nats per rollout) and `log_ratio_token_abs_age_B` (mean |trainer - sampler
    log-prob| of a token, nats) of the rollouts that a pass was made for, None without any; and `num_rollouts_age_B`.
    """
    buckets: dict[str, list[ForwardResult]] = {}
    for item in sorted(scored, key=lambda item: item.policy_age):
        buckets.setdefault(bucket_name(max(0, item.policy_age)), []).append(item)
    metrics: dict[str, float | None] = {}
    for name, items in buckets.items():
        passed = _passed(items)
        log_ratio = _log_ratios(passed)
        metrics[f"ess_age_{name}"] = ess_ratio(log_ratio)
        metrics[f"log_ratio_mean_age_{name}"] = _ratio(log_ratio.sum(), len(passed))
        metrics[f"log_ratio_token_abs_age_{name}"] = _ratio(sum(item.abs_gap for item in passed), _num_tokens(passed))
        metrics[f"num_rollouts_age_{name}"] = float(len(items))
    return metrics


def batch_metrics(
    scored: Sequence[ForwardResult],
    *,
    step: int,
    success_reward: float,
    policy_temperature: float,
    tasks_with_minimum: Collection[str] = (),
) -> dict[str, float | None]:
    """Return the metrics of one batch, taken at theta before the update.

    What depends on theta is of the rollouts that a pass was made for, and None without any.

    `logprob_gap_on_policy` is the mean |trainer - sampler log-prob| per token over rollouts of policy age 0 that were
    sampled from the whole distribution at the policy temperature; None without such rollouts.

    Args:
        scored: the rollouts of the batch, at least one.
        step: the optimizer step that the batch is for.
        success_reward: a reward from which on a rollout counts as a success.
        policy_temperature: what theta's logits are divided by.
        tasks_with_minimum: tasks with a minimum length, below which searchers cannot sample end of sequence.
    """
    rewards = np.array([s.rollout.reward for s in scored], dtype=np.float64)
    ages = np.array([s.policy_age for s in scored])
    passed = _passed(scored)
    log_ratio = _log_ratios(passed)
    # for these rollouts trainer and sampler must agree: the same weights, the same distribution
    on_policy = [
        s
        for s in passed
        if s.policy_age == 0
        # after a rollback those of the weights that were left have age 0 too
        and all(span.version.step < step for span in s.rollout.version_spans)
        and s.rollout.task not in tasks_with_minimum
        and _is_policy(s.rollout, policy_temperature)
    ]
    gap = _ratio(sum(s.abs_gap for s in on_policy), _num_tokens(on_policy))
    return {
        "reward_mean": float(rewards.mean()),
        "accuracy": float((rewards >= success_reward).mean()),
        "policy_age_mean": float(ages.mean()),
        "policy_age_max": float(ages.max()),
        "ess": ess_ratio(log_ratio),
        "log_ratio_mean": _ratio(log_ratio.sum(), len(passed)),
        "log_ratio_token_mean": _ratio(log_ratio.sum(), _num_tokens(passed)),
        "kl_to_ref": _kl_to_ref(scored),
        "logprob_gap_on_policy": gap,
        "num_rollouts": float(len(scored)),
        "num_tokens": float(_num_tokens(scored)),
        "num_unique_rollouts": float(len({s.rollout.response_tokens.tobytes() for s in scored})),
        **age_metrics(scored),
    }


def _log_ratios(scored: Sequence[ForwardResult]) -> NDArray[np.float64]:
    """Return log pi_theta - log pi_behaviour of every rollout that a pass was made for, in nats."""
    return np.array(
        [s.logprob - float(s.rollout.sampler_logprobs.sum(dtype=np.float64)) for s in scored if s.logprob is not None]
    )


def _kl_to_ref(scored: Sequence[ForwardResult]) -> float | None:
    pairs = [(s.logprob, s.ref_logprob) for s in scored]
    differences = [theta - ref for theta, ref in pairs if theta is not None and ref is not None]
    return _known(np.mean(differences)) if len(differences) == len(scored) else None


def _passed(scored: Sequence[ForwardResult]) -> list[ForwardResult]:
    """Return those that a pass was made for."""
    return [s for s in scored if s.logprob is not None]


def _ratio(total: float, num: int) -> float | None:
    """Return the mean of `num` numbers, None where it is unknown."""
    return _known(total / num) if num else None


def _num_tokens(scored: Sequence[ForwardResult]) -> int:
    return sum(len(s.rollout.response_tokens) for s in scored)


def _known(value: float | np.floating) -> float | None:
    """Return a finite number, or None for any other."""
    return float(value) if math.isfinite(value) else None


def _is_policy(rollout: Rollout, policy_temperature: float) -> bool:
    sampling = rollout.sampling
    return sampling.temperature == policy_temperature and sampling.top_p == 1.0 and sampling.top_k == 0
