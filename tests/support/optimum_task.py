"""The enumerable task: 64 outcomes (vocabulary 4, length 3), exact expected gradients, one prompt.

Where does an objective converge? Every pair of outcomes is a group (K = 2), weighted by its probability under the
behaviour policy, as in an infinite batch. The loss is the trainer's own code (`advantages`, `objective_loss`). The
answer is the total variation between the trained policy and pi*, which is proportional to pi_ref exp(r / beta).
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tba_trainer.objectives import Objective, Sequences, Tokens, Totals, advantages, objective_loss, resolve
from torch import Tensor

from tba.config import ObjectiveSection

VOCAB, LENGTH = 4, 3
BETA = 0.25
OUTCOMES = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))  # [64, 3]
NUM_OUTCOMES = len(OUTCOMES)
_FIRST, _SECOND = torch.combinations(torch.arange(NUM_OUTCOMES), with_replacement=True).T
_PAIRS = torch.stack([_FIRST, _SECOND], dim=1).flatten()  # [2 * 2080]
_PAIR_NUMBER = torch.arange(len(_FIRST)).repeat_interleave(2)
_TIMES = torch.where(_FIRST == _SECOND, 1.0, 2.0).double()
"""How many ordered pairs each unordered pair stands for."""
_TOTALS = Totals(num_rollouts=len(_PAIRS), num_tokens=LENGTH * len(_PAIRS), num_groups=len(_FIRST))

Behaviour = Literal["on-policy", "lag", "uniform", "stale"]


@dataclass(frozen=True, slots=True)
class Case:
    """One behaviour policy that the data comes from.

    `on-policy`: theta itself. `lag`: theta of `age` steps ago. `uniform`, `stale`: fixed policies with the policy age
    `age`; `stale` is a random policy other than the starting one.
    """

    behaviour: Behaviour
    age: int = 0


class Tabular:
    """An autoregressive policy with its own logits after every prefix."""

    def __init__(self, seed: int, scale: float) -> None:
        rng = np.random.default_rng(seed)
        self.tables = [
            torch.tensor(rng.normal(size=(VOCAB**i, VOCAB)) * scale, requires_grad=True) for i in range(LENGTH)
        ]

    def token_logprobs(self) -> Tensor:
        """Return log pi of every token of every outcome, [64, 3]."""
        prefix, columns = torch.zeros(NUM_OUTCOMES, dtype=torch.long), []
        for i, table in enumerate(self.tables):
            columns.append(table.log_softmax(1)[prefix, OUTCOMES[:, i]])
            prefix = prefix * VOCAB + OUTCOMES[:, i]
        return torch.stack(columns, dim=1)

    @torch.no_grad()
    def become(self, other: Tabular) -> None:
        """Copy the logits of another policy."""
        for table, source in zip(self.tables, other.tables, strict=True):
            table.copy_(source)


def rewards() -> Tensor:
    return torch.tensor(np.random.default_rng(11).random(NUM_OUTCOMES))


def starting_policy() -> Tabular:
    """Return the policy that every run starts from, which is also its reference."""
    return Tabular(1, 0.5)


def converge(section: ObjectiveSection, case: Case, *, num_steps: int) -> float:
    """Train with exact expected gradients (Adam, rate 0.1 falling to 0.0001); return the total variation to pi*."""
    objective, reward = resolve(section, max_response_tokens=LENGTH), rewards()
    policy, reference = starting_policy(), starting_policy()
    stale = Tabular(2, 1.0).token_logprobs().detach()
    adam = torch.optim.Adam(policy.tables, lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.001 ** (1 / num_steps))
    past: deque[Tensor] = deque(maxlen=case.age + 1)
    for step in range(1, num_steps + 1):
        logprobs = policy.token_logprobs()
        past.append(logprobs.detach())
        sampler = {
            "on-policy": past[-1],
            "lag": past[max(0, len(past) - 1 - case.age)],
            "uniform": torch.full_like(stale, -float(np.log(VOCAB))),
            "stale": stale,
        }[case.behaviour]
        ref = reference.token_logprobs().detach()
        loss = _expected_loss(logprobs, sampler, ref, reward, objective, case.age, section.beta.at(step - 1))
        adam.zero_grad()
        loss.backward()
        adam.step()
        decay.step()
        if objective.reset_steps is not None and step % objective.reset_steps == 0:
            reference.become(policy)
    reached = policy.token_logprobs().detach().sum(1).exp()
    optimum = (starting_policy().token_logprobs().detach().sum(1) + reward / BETA).softmax(0)
    return float((reached - optimum).abs().sum() / 2)


def _expected_loss(
    logprobs: Tensor, sampler: Tensor, reference: Tensor, reward: Tensor, objective: Objective, age: int, beta: float
) -> Tensor:
    logprob = logprobs.detach().sum(1)
    probability = (sampler.sum(1)[_FIRST] + sampler.sum(1)[_SECOND]).exp() * _TIMES  # [pairs]
    sequences = Sequences(
        logprob=logprob[_PAIRS],
        sampler_logprob=sampler.sum(1)[_PAIRS],
        ref_log_ratio=_log_ratio(logprobs.detach(), reference, objective)[_PAIRS],
        sampler_ref_log_ratio=_log_ratio(sampler, reference, objective)[_PAIRS],
        reward=reward[_PAIRS],
        policy_age=torch.full((len(_PAIRS),), age),
        group=_PAIR_NUMBER,
        num_tokens=torch.full((len(_PAIRS),), LENGTH),
    )
    advantage = advantages(sequences, objective, beta=beta)
    if (
        objective.parts.kind == "batch"
    ):  # its mean is over a batch of the behaviour's outcomes, not over all outcomes alike
        advantage = advantage - (advantage * probability.repeat_interleave(2)).sum() / 2
    tokens = Tokens(
        logprobs=logprobs[_PAIRS].flatten(),
        sampler_logprobs=sampler[_PAIRS].flatten(),
        row=torch.arange(len(_PAIRS)).repeat_interleave(LENGTH),
        num_rows=len(_PAIRS),
        trainer_logprobs=sampler[_PAIRS].flatten(),
        num_untrained=torch.ones(len(_PAIRS)),
    )
    weighted = advantage * (probability * len(_FIRST)).repeat_interleave(2)
    return objective_loss(tokens, weighted, objective, totals=_TOTALS)[0]


def _log_ratio(logprobs: Tensor, reference: Tensor, objective: Objective) -> Tensor:
    """Return the sequence log-ratio to the reference [outcomes], with the objective's clamp per token."""
    limit = objective.parts.log_ratio_token_clamp if objective.clamps_tokens else None
    return (logprobs - reference).clamp(-(limit or torch.inf), limit or torch.inf).sum(1)
