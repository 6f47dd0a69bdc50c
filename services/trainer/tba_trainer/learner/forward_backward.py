"""Forward and backward passes of one batch.

A_j may need log pi_theta of other rollouts at the current weights (of their group, for some objectives of the whole
batch). A group inside one micro-batch gets them from the forward pass that the gradient needs anyway; only groups that
span micro-batches cost a first pass without gradient. Both ways give the same gradient
(tests/unit/trainer/test_trainer_forward_backward.py).

Masked rollouts add nothing to the gradient, nor do those whose A_j is 0 by rewards alone. Such an A_j occurs in groups
of equal rewards, and below the baseline with a `negative_weight` of 0. If no A_j depends on theta, these rollouts get
no pass. A group masked by `mask_tied` gets none either, unless A_j of other groups depends on its log-probs. Metrics of
theta leave out rollouts without a pass.

With several ranks each works on its own micro-batches of one plan. Every rank fills in the numbers of its rollouts and
leaves zeros for the others; a sum over the ranks completes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.wire import Rollout
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import PackedSequences, pack_sequences, rollout_sums, upload
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
    reward_spread,
    second_moment_cut,
)

Values = NDArray[np.float64]
"""Log-probs of one rollout: one number per trained token [T], or only their sum [1]."""
Logprobs = Callable[[Sequence[Rollout]], Sequence[Values] | None]
"""Returns the log-probs of rollouts under another policy than theta, or None if the objective needs none."""
Plan = list[list[list[int]]]
"""`plan[round][rank]` is a micro-batch: a list of rollout indices, perhaps empty. All ranks run a round together."""
FIRST_PASS_COST = 1 / 3
"""Cost of a pass without gradient (forward) as a share of one with gradient (forward and backward)."""
_FILLER = np.zeros(1, dtype=np.int32)
"""Prompt, and response, of the filler that takes the place of an empty micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that share a batch; by default there is one."""

    rank: int = 0
    num_ranks: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda values: values
    """Returns in every rank the sum of a float64 CPU tensor over all ranks; all ranks call it in the same order."""


ALONE = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Log-probs of one rollout from the forward pass: sums over the trained tokens, in nats."""

    rollout: Rollout
    policy_age: int
    logprob: float | None
    """None: no pass was made for the rollout, since it adds nothing to the gradient."""
    ref_logprob: float | None
    """None where the objective needs no reference, or no pass was made."""
    abs_gap: float
    """Sum over tokens of |trainer log-prob - sampler log-prob|; 0 without a pass."""
    advantage: float | None = None
    """A_j; None: the objective is a user's function."""
    weight: float | None = None
    """The mean of w_jt over the tokens; None: no pass was made, or the objective has no such weight."""


class ForwardBackward:
    """Forward and backward passes over N rollouts. Every rank gets the same arguments except `ranks.rank`.

    Args:
        policy: theta at the policy temperature.
        objective: decides A_j, the token weights and the divisor.
        rollouts: [N] the whole batch, of which this rank works on a share.
        groups: [N] group of each rollout, numbered from 0: its slot, so two slots of one prompt are two groups.
        rewards: [N] the rollouts' rewards, shuffled under `trainer.shuffle_rewards`.
        reference: returns log pi_ref, per token if the objective clamps tokens. It is called only with rollouts whose
            log-probs are used.
        old_policy: returns the log-probs per token of the policy that sampled, computed again by the trainer.
        policy_ages: [N] optimizer steps.
        beta: KL coefficient of this step.
        micro_batch_tokens: upper bound of the tokens of one pass.
        ranks: the processes that share the batch.
    """

    def __init__(
        self,
        policy: LogprobModel,
        objective: Objective,
        rollouts: Sequence[Rollout],
        *,
        groups: Sequence[int],
        rewards: NDArray[np.float64],
        reference: Logprobs | None = None,
        old_policy: Logprobs | None = None,
        policy_ages: Sequence[int],
        beta: float,
        micro_batch_tokens: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self._policy, self._objective, self._rollouts, self._beta = policy, objective, rollouts, beta
        self._ages, self._groups, self._ranks = list(policy_ages), groups, ranks
        num_tokens = torch.tensor([r.num_sampled for r in rollouts])
        # Rollouts that were cut off count in the baseline of their group, and nowhere else.
        truncated = [objective.mask_truncated and r.is_truncated for r in rollouts]
        self._kept = ~torch.tensor(truncated, dtype=torch.bool)  # [N]
        # the divisors of the loss are those of the whole batch: so the losses of micro-batches and ranks add up
        self._totals = Totals(
            num_rollouts=int(self._kept.sum()),
            num_tokens=int(num_tokens[self._kept].sum()),
            num_groups=len({group for group, is_cut in zip(groups, truncated, strict=True) if not is_cut}),
        )
        self._is_read = torch.ones(len(rollouts), dtype=torch.bool)  # [N]
        """False for rollouts of tied groups whose log-probs nothing uses (`mask_tied`)."""
        if objective.mask_tied:
            tied = is_tied(torch.from_numpy(rewards), torch.tensor(groups))
            # after the divisors: the gradient is what it was without the part of these groups
            self._kept &= ~tied
            if not objective.needs_complete_batch:
                self._is_read = ~tied
        self._ref = self._ask(reference)
        self._recomputed = self._ask(old_policy)
        self._sampler = [rollout.sampler_logprobs for rollout in rollouts]
        self._sequences = self._sums(rewards, num_tokens)
        self._reward_advantage: Tensor | None = None
        """A_j, if it depends on rewards alone."""
        if objective.reads_theta or objective.needs_all_tokens:
            # A_j depends on theta: it is known only after the pass. One that was cut off has its pass: it counts in the
            # centre of its group
            passed = self._is_read
        else:
            self._reward_advantage = advantages(self._sequences, objective, beta=beta)
            passed = (self._reward_advantage != 0) & self._kept
        self._passed = passed.nonzero()[:, 0].tolist()
        """Indices of the rollouts that get a pass."""
        self._plan = plan_micro_batches(
            [rollout.num_tokens for rollout in rollouts],
            groups,
            micro_batch_tokens,
            rows=self._passed,
            num_ranks=ranks.num_ranks,
            keep_groups=objective.needs_complete_groups,
        )
        self._micro_batches = [micro_batches[ranks.rank] for micro_batches in self._plan]
        self._advantage, self._weight, self._logprob, self._abs_gap = torch.zeros(4, len(rollouts), dtype=torch.float64)
        num_squares = int(num_tokens.sum()) if objective.needs_all_tokens else 0
        self._squares = torch.zeros(num_squares, dtype=torch.float64)
        """(log rho)^2 of every token of the batch, where the objective needs all of them."""

    def _ask(self, logprobs: Logprobs | None) -> list[Values] | None:
        """Return the result of `logprobs` for all rollouts, with zeros for those whose log-probs nothing reads."""
        rows = self._is_read.nonzero()[:, 0].tolist()
        values = None if logprobs is None else logprobs([self._rollouts[row] for row in rows])
        if values is None:
            return None
        everything = [np.zeros(rollout.num_sampled) for rollout in self._rollouts]
        for row, found in zip(rows, values, strict=True):
            everything[row] = found
        return everything

    def _sums(self, rewards: NDArray[np.float64], num_tokens: Tensor) -> Sequences:
        """Return the sums of log-probs of every rollout; theta's are zeros, which the passes overwrite."""
        # sums are small and many: they live on the CPU, in float64
        behaviour = self._recomputed or self._sampler
        sampler_logprob = torch.tensor([values.sum(dtype=np.float64) for values in behaviour])
        self._ref_logprob = torch.zeros(len(behaviour), dtype=torch.float64)
        if self._ref is not None:
            self._ref_logprob = torch.tensor([float(values.sum()) for values in self._ref], dtype=torch.float64)
        sampler_ref_log_ratio = sampler_logprob - self._ref_logprob
        self._token_clamp = self._objective.parts.log_ratio_token_clamp or math.inf
        self._ref_tokens = self._ref if self._objective.clamps_tokens else None
        if self._ref_tokens is not None:
            differences = [a.astype(np.float64) - b for a, b in zip(behaviour, self._ref_tokens, strict=True)]
            limit = self._token_clamp
            sampler_ref_log_ratio = torch.tensor([difference.clip(-limit, limit).sum() for difference in differences])
        return Sequences(
            logprob=torch.zeros(len(behaviour), dtype=torch.float64),
            sampler_logprob=sampler_logprob,
            ref_log_ratio=torch.zeros(len(behaviour), dtype=torch.float64),
            sampler_ref_log_ratio=sampler_ref_log_ratio,
            reward=torch.tensor(rewards, dtype=torch.float64),
            policy_age=torch.tensor(self._ages),
            group=torch.tensor(self._groups),
            num_tokens=num_tokens,
        )

    def backward(self) -> dict[str, float | None]:
        """Add up the gradient of this rank's share of the batch; return the objective's metrics of the whole batch."""
        self._first_pass()
        passes = [self._micro_batch(rows) for rows in self._micro_batches]
        # not after each micro-batch: while the device is at its backward pass, the host prepares the next one
        vectors = [
            torch.cat([torch.stack([*metrics.values()]), weights]) for metrics, weights in passes
        ]  # [M + b] each
        values = torch.cat(vectors).cpu().split([len(vector) for vector in vectors])
        totals: dict[str, float] = {}
        for rows, (metrics, weights), vector in zip(self._micro_batches, passes, values, strict=True):
            of_metrics, self._weight[rows] = vector.split([len(metrics), len(weights)])
            for name, value in zip(metrics, of_metrics.tolist(), strict=True):
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
        found |= reward_spread(self._sequences.reward, self._sequences.group)
        found["num_rollouts_without_gradient"] = float(len(self._rollouts) - len(self._passed))
        return found

    def results(self) -> list[ForwardResult]:
        """Return the results of `backward` for each rollout, in the order of the batch."""
        passed, has_parts = set(self._passed), self._objective.function is None
        refs = None if self._ref is None else self._ref_logprob.tolist()
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
        """Compute log-prob sums of theta, without gradient, of rollouts whose A_j needs other micro-batches."""
        if not self._objective.needs_complete_groups:
            return
        # with a single micro-batch its own forward pass is the whole batch
        everything = self._objective.needs_complete_batch and len(self._plan) * self._ranks.num_ranks > 1
        rounds = range(len(self._plan)) if everything else split_rounds(self._plan, self._groups)
        if not rounds:
            return
        for i in rounds:
            rows = self._micro_batches[i]
            sequences = pack_rollouts([self._rollouts[row] for row in rows], self._policy.device)
            self._put_sums(rows, self._policy.token_logprobs(sequences), sequences)
        # one exchange for everything, as in `backward`
        mine = (self._sequences.logprob, self._sequences.ref_log_ratio, self._squares)
        added = self._ranks.all_reduce(torch.cat(mine))  # [2 N + T]
        for values, found in zip(mine, added.split([len(values) for values in mine]), strict=True):
            values.copy_(found)
        if everything and self._objective.needs_all_tokens:
            self._cut_second_moment()

    def _micro_batch(self, rows: list[int]) -> tuple[dict[str, Float[Tensor, ""]], Float[Tensor, " b"]]:
        """Run the forward and backward pass of the b rollouts `rows`.

        Returns:
            Their share of the metrics, and the mean token weight of each rollout, in float64 on the device.
        """
        sequences = pack_rollouts([self._rollouts[row] for row in rows], self._policy.device)
        logprobs, entropy = self._policy.logprobs_and_entropy(sequences)  # [T]
        # A_j is a constant of the loss (stopgrad in Eq. 5's A-form): its log-probs are detached before they are summed
        tokens = self._put_sums(rows, logprobs, sequences)
        if self._objective.needs_all_tokens and len(self._plan) * self._ranks.num_ranks == 1:
            self._cut_second_moment()  # the first pass did it where there are several micro-batches
        self._logprob[rows] = self._sequences.logprob[rows]
        # a group that is not complete here has its sums from the first pass, or needs none but its own
        if self._objective.function is not None:
            index = torch.tensor(rows, dtype=torch.long)
            loss, metrics = custom_loss(
                tokens, index, self._sequences, self._objective, beta=self._beta, totals=self._totals
            )
            weights = logprobs.new_zeros(len(rows), dtype=torch.float64)
        else:
            self._advantage[rows] = advantages(self._sequences, self._objective, beta=self._beta)[rows]
            padded = torch.zeros(tokens.num_rows, dtype=logprobs.dtype)  # [B]; the filler keeps advantage 0
            padded[: len(rows)] = self._advantage[rows].to(padded.dtype)
            on_device = upload(padded, logprobs.device)
            loss, metrics, weights = objective_loss(tokens, on_device, self._objective, totals=self._totals)
        loss.backward()  # at once: the activations of one micro-batch are all that memory ever holds
        num_tokens = self._sequences.num_tokens
        share = int(num_tokens[rows].sum()) / max(1, int(num_tokens[self._passed].sum()))
        return {**metrics, "entropy": entropy.double() * share}, weights[: len(rows)]

    def _cut_second_moment(self) -> None:
        """Set the bound of (log rho)^2 above which `second_moment` masks tokens."""
        squares = self._squares[self._kept.repeat_interleave(self._sequences.num_tokens)]
        self._totals = replace(self._totals, max_second_moment=second_moment_cut(squares))

    def _put_sums(self, rows: list[int], logprobs: Float[Tensor, " T"], sequences: PackedSequences) -> Tokens:
        """Store theta's log-prob sums of the rollouts `rows`, and return the tokens of the micro-batch."""
        found = logprobs.detach()
        untrained = [self._rollouts[i].num_tokens - self._rollouts[i].num_sampled for i in rows] or [len(_FILLER)]
        kept = self._kept[rows] if rows else torch.zeros(1, dtype=torch.bool)  # a filler teaches nothing
        recomputed = self._recomputed
        tokens = Tokens(
            logprobs=logprobs,
            sampler_logprobs=self._on_device(self._sampler, rows, logprobs),
            row=sequences.row,
            num_rows=sequences.num_rows,
            trainer_logprobs=None if recomputed is None else self._on_device(recomputed, rows, logprobs),
            num_untrained=upload(torch.tensor(untrained), logprobs.device),
            kept=None if bool(kept.all()) else upload(kept, logprobs.device),
        )
        summed = [found, (found - tokens.sampler_logprobs).abs()]
        if self._ref_tokens is not None:
            ref = self._on_device(self._ref_tokens, rows, logprobs)
            summed.append((found - ref).clamp(-self._token_clamp, self._token_clamp))
        columns = [rollout_sums(values, sequences)[: len(rows)] for values in summed]
        if self._objective.needs_all_tokens and rows:
            columns.append(log_ratios(tokens, self._objective).square())
        # one wait for the device
        on_cpu = torch.cat(columns).double().cpu().split([len(values) for values in columns])
        logprob, self._abs_gap[rows], *more = on_cpu
        self._sequences.logprob[rows] = logprob
        clamped = more.pop(0) if self._ref_tokens is not None else logprob - self._ref_logprob[rows]
        self._sequences.ref_log_ratio[rows] = clamped
        if more:
            starts = self._sequences.num_tokens.cumsum(0) - self._sequences.num_tokens  # [N]
            lengths = self._sequences.num_tokens[rows]
            # the micro-batch's tokens lie rollout after rollout, as those of the batch do
            at = torch.cat([torch.arange(n) + s for s, n in zip(starts[rows].tolist(), lengths.tolist(), strict=True)])
            (self._squares[at],) = more
        return tokens

    def _on_device(self, values: Sequence[NDArray[Any]], rows: list[int], like: Float[Tensor, " T"]) -> Tensor:
        """Return the concatenated values [T] of the rollouts `rows`, with the dtype and device of `like`."""
        joined = np.concatenate([values[i] for i in rows] or [_FILLER])
        return upload(torch.from_numpy(joined).to(like.dtype), like.device)


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> PackedSequences:
    """Pack rollouts for one pass; an empty list gives a filler of one token, so that this rank makes a pass too."""
    # an empty micro-batch is passed through the model all the same: the other ranks wait in the same collectives
    prompts, responses, trained, owners = [], [], [], []
    for number, rollout in enumerate(rollouts):
        for sequence in rollout.sequences:
            spans = sequence.trained_spans
            first, end = spans[0][0], spans[-1][1]
            mask = np.zeros(end - first, dtype=np.bool_)
            for start, stop in spans:
                mask[start - first : stop - first] = True
            prompts.append(sequence.tokens[:first])
            # what follows the last trained token predicts nothing
            responses.append(sequence.tokens[first:end])
            trained.append(mask)
            owners.append(number)
    if not rollouts:
        return pack_sequences([_FILLER], [_FILLER], device)
    return pack_sequences(prompts, responses, device, trained=trained, rollouts=owners)


def plan_micro_batches(
    lengths: Sequence[int],
    groups: Sequence[int],
    max_tokens: int,
    *,
    rows: Sequence[int],
    num_ranks: int,
    keep_groups: bool,
) -> Plan:
    """Distribute rollouts over micro-batches of at most `max_tokens`, all with about the same number of tokens.

    A rollout longer than `max_tokens` gets a micro-batch of its own. This is a pure function, so every rank computes
    the same plan of all ranks. All ranks get the same number of micro-batches, because every pass of a sharded model is
    a collective; some are empty if there are few rollouts.

    Args:
        lengths: [N] tokens of all sequences of each rollout.
        groups: [N] group number of each rollout.
        max_tokens: largest number of tokens of one micro-batch.
        rows: indices of the rollouts to distribute, ascending.
        num_ranks: processes that share the batch.
        keep_groups: keep a group in one micro-batch if it fits, so that it needs no first pass, unless splitting groups
            is faster. False if no advantage depends on theta's log-probs of other rollouts.
    """
    plan = _pack([[row] for row in rows], lengths, max_tokens, num_ranks)
    if not keep_groups:
        return plan
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(row)
    items: list[list[int]] = []
    for group in members.values():
        fits = sum(lengths[row] for row in group) <= max_tokens
        items.extend([group] if fits else [[row] for row in group])
    kept = _pack(items, lengths, max_tokens, num_ranks)
    # groups are split all the same where ranks would else wait for each other longer than the first pass takes
    return min(kept, plan, key=lambda each: _cost(each, lengths, groups))


def _pack(items: Sequence[list[int]], lengths: Sequence[int], max_tokens: int, num_ranks: int) -> Plan:
    """Put items into micro-batches, the largest item first, each into the emptiest one. A round has similar sizes."""

    def load(rows: list[int]) -> int:
        return sum(lengths[row] for row in rows)

    order = sorted(items, key=lambda item: (-load(item), item))
    # an item longer than a micro-batch fills one, no more
    num_tokens = sum(min(load(item), max_tokens) for item in items)
    # -(-a // b) is a / b, rounded up. No fewer can hold that many tokens; more are tried where they do not fit.
    num_bins = num_ranks * max(1, -(-num_tokens // (max_tokens * num_ranks)))
    while True:  # with one more per rank each time, until everything fits
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for item in order:
            emptiest = min(range(num_bins), key=loads.__getitem__)
            if loads[emptiest] and loads[emptiest] + load(item) > max_tokens:
                break
            bins[emptiest].extend(item)
            loads[emptiest] += load(item)
        else:
            break
        num_bins += num_ranks
    # the largest first: a micro-batch that does not fit into memory then fails at once
    by_load = [sorted(rows) for rows in sorted(bins, key=lambda rows: (-load(rows), rows))]
    return [by_load[start : start + num_ranks] for start in range(0, len(by_load), num_ranks)]


def split_rounds(plan: Plan, groups: Sequence[int]) -> list[int]:
    """Return the indices of the rounds that split a group over micro-batches, so that it needs a first pass."""
    sizes = Counter(groups[row] for micro_batches in plan for rows in micro_batches for row in rows)

    def is_split(rows: list[int]) -> bool:
        here = Counter(groups[row] for row in rows)
        return any(num < sizes[group] for group, num in here.items())

    return [i for i, micro_batches in enumerate(plan) if any(map(is_split, micro_batches))]


def _cost(plan: Plan, lengths: Sequence[int], groups: Sequence[int]) -> float:
    """Return the cost of a plan, in tokens: the sum over rounds of the slowest rank's passes, first passes included."""
    rounds = [max(sum(lengths[row] for row in rows) for rows in micro_batches) for micro_batches in plan]
    return sum(rounds) + FIRST_PASS_COST * sum(rounds[i] for i in split_rounds(plan, groups))
