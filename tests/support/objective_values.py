"""Small differentiable problems for tests of the objectives, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tba_trainer.objectives import (
    Objective,
    Sequences,
    Tokens,
    Totals,
    advantages,
    log_ratios,
    objective_loss,
    resolve,
    second_moment_cut,
)
from torch import Tensor

from tba.config import ObjectiveSection

VOCAB, MAX_TOKENS = 9, 16


def objective_of(preset: str, **fields: Any) -> Objective:
    """Return the resolved objective of a preset. `fields` override recipe keys, or else parts of the preset."""
    constants = {name: fields.pop(name) for name in {*fields} - {*ObjectiveSection.model_fields}}
    found = resolve(ObjectiveSection.model_validate({"preset": preset, **fields}), max_response_tokens=MAX_TOKENS)
    return replace(found, parts=replace(found.parts, **constants))


def weighted_loss(sequences: Sequences, tokens: Tokens, settings: Objective, beta: float) -> Tensor:
    """A user's objective that reads all inputs: log-probs of all rollouts, ages, lengths and settings."""
    ratio = sequences.logprob - sequences.ref_logprob
    advantage = sequences.reward - beta * (ratio - ratio.mean()) / (1 + sequences.policy_age)
    weight = (tokens.logprobs.detach() - tokens.sampler_logprobs).exp().clamp(max=settings.importance_clamp)
    return -(advantage / sequences.num_tokens)[tokens.row] * weight * tokens.logprobs


@dataclass(frozen=True, kw_only=True)
class Problem:
    """N rollouts of different lengths whose token log-probs are a function of one parameter matrix `theta`."""

    theta: Tensor
    """[positions, VOCAB] logits, with gradient."""
    tokens: tuple[Tensor, ...]
    sampler: tuple[Tensor, ...]
    """Sampler log-probs per token."""
    ref: Tensor
    reward: Tensor
    age: Tensor
    group: Tensor
    prompt_lengths: Tensor
    recomputed: tuple[Tensor, ...]
    """The trainer's recomputed log-probs of the policy that sampled, per token."""
    ref_tokens: tuple[Tensor, ...]
    """Ref log-probs per token; `ref` has their sums."""

    @property
    def num_rollouts(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(tokens) for tokens in self.tokens])

    def totals(self, objective: Objective) -> Totals:
        totals = Totals(
            num_rollouts=self.num_rollouts, num_tokens=int(self.lengths.sum()), num_groups=len(self.group.unique())
        )
        if not objective.needs_all_tokens:
            return totals
        squares = log_ratios(self.micro_batch(range(self.num_rollouts)), objective).square()
        return replace(totals, max_second_moment=second_moment_cut(squares))

    def micro_batch(self, rows: Sequence[int]) -> Tokens:
        rows = list(rows)
        return Tokens(
            logprobs=torch.cat([self.logprobs(row) for row in rows]),
            sampler_logprobs=torch.cat([self.sampler[row] for row in rows]),
            row=torch.arange(len(rows)).repeat_interleave(self.lengths[rows]),
            num_rows=len(rows),
            trainer_logprobs=torch.cat([self.recomputed[row] for row in rows]),
            num_untrained=self.prompt_lengths[rows],
        )

    def logprobs(self, row: int) -> Tensor:
        """Return the trainer log-probs of a rollout's tokens, with gradient."""
        tokens = self.tokens[row]
        return self.theta.log_softmax(1)[torch.arange(len(tokens)), tokens]

    def logprob(self) -> Tensor:
        """Return the sums [N] of the trainer log-probs per rollout, with gradient."""
        return torch.stack([self.logprobs(row).sum() for row in range(self.num_rollouts)])

    def sampler_logprob(self) -> Tensor:
        return torch.stack([values.sum() for values in self.sampler])

    def sequences(self, objective: Objective | None = None) -> Sequences:
        """Return the input of `advantages`; the objective decides the behaviour log-probs and the token clamp."""
        recomputes = objective is not None and objective.parts.old_policy == "trainer"
        behaviour = self.recomputed if recomputes else self.sampler
        logprob, sampler_logprob = self.logprob().detach(), torch.stack([values.sum() for values in behaviour])
        ref_log_ratio, sampler_ref_log_ratio = logprob - self.ref, sampler_logprob - self.ref
        if objective is not None and objective.clamps_tokens:
            limit = objective.parts.log_ratio_token_clamp or 0.0
            rows = range(self.num_rollouts)
            ref_log_ratio = torch.stack(
                [(self.logprobs(row).detach() - self.ref_tokens[row]).clamp(-limit, limit).sum() for row in rows]
            )
            sampler_ref_log_ratio = torch.stack(
                [(behaviour[row] - self.ref_tokens[row]).clamp(-limit, limit).sum() for row in rows]
            )
        return Sequences(
            logprob=logprob,
            sampler_logprob=sampler_logprob,
            ref_log_ratio=ref_log_ratio,
            sampler_ref_log_ratio=sampler_ref_log_ratio,
            reward=self.reward,
            policy_age=self.age,
            group=self.group,
            num_tokens=self.lengths,
        )

    def rows(self, rows: Sequence[int]) -> Problem:
        """Return the problem with only these rollouts, in this order."""
        index = torch.tensor(list(rows), dtype=torch.long)
        return replace(
            self,
            tokens=tuple(self.tokens[row] for row in rows),
            sampler=tuple(self.sampler[row] for row in rows),
            recomputed=tuple(self.recomputed[row] for row in rows),
            ref_tokens=tuple(self.ref_tokens[row] for row in rows),
            **{name: getattr(self, name)[index] for name in ("ref", "reward", "age", "group", "prompt_lengths")},
        )

    def gradient_of(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.theta)
        return gradient

    def loss(
        self, objective: Objective, *, beta: float, cuts: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss summed over micro-batches of the rows in `cuts` (by default one of all), and its metrics."""
        advantage = advantages(self.sequences(objective), objective, beta=beta)
        total, sums = torch.zeros((), dtype=torch.float64), {}
        for rows in cuts or [range(self.num_rollouts)]:
            tokens = self.micro_batch(rows)
            loss, metrics, _ = objective_loss(tokens, advantage[list(rows)], objective, totals=self.totals(objective))
            total = total + loss
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
        return total, sums

    def gradient(self, objective: Objective, *, beta: float, cuts: Sequence[Sequence[int]] | None = None) -> Tensor:
        return self.gradient_of(self.loss(objective, beta=beta, cuts=cuts)[0])


def make_problem(
    seed: int, *, sizes: Sequence[int] = (6,), drift: float = 0.3, age: int = 0, num_positions: int = 5
) -> Problem:
    """Return groups of these sizes with random lengths, rewards and ref log-probs; with `drift` 0 it is on-policy."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.tensor(rng.normal(size=shape))

    num_rollouts = sum(sizes)
    theta = normal(num_positions, VOCAB).requires_grad_(True)
    tokens = tuple(
        torch.tensor(rng.integers(0, VOCAB, int(rng.integers(2, num_positions + 1)))) for _ in range(num_rollouts)
    )
    ref_tokens = tuple(normal(len(each)) - 2 for each in tokens)
    problem = Problem(
        theta=theta,
        tokens=tokens,
        sampler=(),
        ref=torch.stack([values.sum() for values in ref_tokens]),
        reward=normal(num_rollouts),
        age=torch.full((num_rollouts,), age),
        group=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        prompt_lengths=torch.tensor(rng.integers(1, 30, num_rollouts)),
        recomputed=(),
        ref_tokens=ref_tokens,
    )
    theta_now = [problem.logprobs(row).detach() for row in range(num_rollouts)]
    recomputed = tuple(values + normal(len(values)) * drift for values in theta_now)
    sampler = tuple(values + normal(len(values)) * drift / 2 for values in recomputed)
    return replace(problem, sampler=sampler, recomputed=recomputed)


def assert_same(left: Tensor, right: Tensor) -> None:
    """Assert that two tensors are equal up to a relative error of 1e-6 in norm."""
    assert float(right.detach().norm()) > 0
    assert float(((left - right).norm() / right.norm()).detach()) < 1e-6
