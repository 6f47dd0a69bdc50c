"""A_j of the baselines.

Where a baseline has a KL (beta above 0), the log-ratio to the reference enters A_j, once per rollout and in units of
the reward: a deviation that rewards are divided by is that of the rewards alone, and the KL is not divided by it.
Otherwise beta would cancel in a group of equal rewards, whose KL would be divided by its own noise. Implementations
that add a KL per token to the loss (GRPO's k3 estimator) or to the reward of each token (PPO) differ from that: ref
log-probs are kept per sequence here. With r'_j = r_j - beta l_j and l_j the log-ratio:

    group           r' - group mean                                       Dr. GRPO, arXiv 2503.20783
    group_std       (r - group mean) / the group's standard deviation     GRPO, arXiv 2402.03300
                    - beta (l - group mean)
    leave_one_out   r' - mean of the others of the group                  RLOO, arXiv 2402.14740
    batch_std       (r - group mean) / its deviation over the batch       PPO with a group mean in place of a value
                    - beta (l - group mean)                               model, arXiv 1707.06347
    batch           r' - batch mean                                       REINFORCE
    best_worst      +- sigmoid(-beta (l_best - l_worst)) on the best and  online DPO, arXiv 2402.04792 (A-form: the
                    the worst of the group, 0 elsewhere                   DPO loss divided by beta)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tba_trainer.objectives.groups import group_extremes, group_grid, group_mean, group_size
from tba_trainer.objectives.resolved import Objective
from tba_trainer.objectives.sequences import Sequences, log_ratio

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it (as TRL does)."""


def baseline_advantages(sequences: Sequences, objective: Objective, *, beta: float) -> Float[Tensor, " N"]:
    """A_j of every rollout. A group of one has A = 0 in every kind but `batch`."""
    s = sequences
    if objective.kind == "best_worst":
        return _best_worst(s, objective, beta=beta)
    pull = torch.zeros_like(s.reward) if objective.anchor is None else beta * log_ratio(s, objective)
    if objective.kind == "batch":
        return s.reward - pull - (s.reward - pull).mean()
    centred, pull = s.reward - group_mean(s.reward, s.group), pull - group_mean(pull, s.group)
    size = group_size(s.reward, s.group)
    if objective.kind == "group_std":
        variance = group_mean(centred.square(), s.group) * size / (size - 1).clamp(min=1)
        return centred / (variance.sqrt() + STD_EPSILON) - pull
    if objective.kind == "leave_one_out":
        return (centred - pull) * size / (size - 1).clamp(min=1)
    if objective.kind == "batch_std":
        variance = centred.square().sum() / max(len(centred) - 1, 1)
        return centred / (variance.sqrt() + STD_EPSILON) - pull
    return centred - pull


def _best_worst(sequences: Sequences, objective: Objective, *, beta: float) -> Float[Tensor, " N"]:
    """Several rollouts may share the highest or the lowest reward: every pair counts, and pairs share the weight of
    their group (the expectation over a random choice among them). A group whose rewards are all equal is skipped."""
    s = sequences
    lowest, highest = group_extremes(s.reward, s.group)
    differs = highest > lowest
    row, column = group_grid(s.group)
    shape = (int(row.max()) + 1, int(column.max()) + 1)

    def grid(values: Tensor) -> Tensor:
        return values.new_zeros(shape).index_put((row, column), values)  # [groups, K]

    best, worst = grid(differs & (s.reward == highest)), grid(differs & (s.reward == lowest))
    ratio = grid(log_ratio(s, objective))
    pairs = (best[:, :, None] & worst[:, None, :]).to(ratio.dtype)  # [groups, K, K]
    pairs = pairs / pairs.sum(dim=(1, 2), keepdim=True).clamp(min=1)
    pull = pairs * torch.sigmoid(-beta * (ratio[:, :, None] - ratio[:, None, :]))
    return (pull.sum(dim=2) - pull.sum(dim=1))[row, column]
