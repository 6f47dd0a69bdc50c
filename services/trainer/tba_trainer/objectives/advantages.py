"""A_j of every objective, from rewards and sequence sums of log-probs.

Where a baseline has a KL (beta above 0), the log-ratio l_j to the reference enters A_j, once per rollout and in units
of the reward: r'_j = r_j - beta l_j. Implementations that add a KL per token to the loss (GRPO's k3 estimator) or to
the reward of each token (PPO) differ from that: ref log-probs are kept per sequence here.

Shapes: N rollouts in complete groups, G groups, K members of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.config.objective import Kind
from tba_trainer.objectives.objective import Objective

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it (as TRL does)."""
LOG_RATIO_CLAMP = 10.0
"""Largest absolute sequence log-ratio to the behaviour policy, in nats, before it is divided by the policy age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """N rollouts whose groups are complete. Log-probs are sums over trained tokens, in nats, without gradient."""

    logprob: Float[Tensor, " N"]
    """log pi_theta at the policy temperature."""
    sampler_logprob: Float[Tensor, " N"]
    """log pi_behaviour at the rollout's own sampling temperature."""
    ref_log_ratio: Float[Tensor, " N"]
    """log pi_theta - log pi_ref at the policy temperature, every token clamped if `Objective.clamps_tokens`. Without
    meaning if `Objective.needs_reference` is false."""
    sampler_ref_log_ratio: Float[Tensor, " N"]
    """log pi_behaviour - log pi_ref, every token clamped in the same way."""
    reward: Float[Tensor, " N"]
    policy_age: Int[Tensor, " N"]
    """Optimizer steps."""
    group: Int[Tensor, " N"]
    """Number of each rollout's group (any integer). The order of the rollouts does not matter."""
    num_tokens: Int[Tensor, " N"]
    """Response tokens."""

    @property
    def ref_logprob(self) -> Float[Tensor, " N"]:
        """log pi_ref at the policy temperature (up to clamped tokens)."""
        return self.logprob - self.ref_log_ratio


def advantages(sequences: Sequences, objective: Objective, *, beta: float) -> Float[Tensor, " N"]:
    """Return A_j of every rollout, detached; negative ones are multiplied by the objective's `negative_weight`.

    Args:
        sequences: whole groups; the whole batch where `objective.needs_complete_batch`.
        beta: KL coefficient of this step.
    """
    if not len(sequences.reward):
        return sequences.reward.detach()
    found = ADVANTAGES[objective.parts.kind](sequences, objective, beta).detach()
    factor = objective.parts.negative_weight
    return found if factor == 1 else torch.where(found < 0, factor * found, found)


def trajectory_balance(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """A_j = (r_j - V) - beta (l_j - centre_j), with V the mean or beta log mean exp(r / beta) of the group.

    For the presets `tb`, `kimi`, `tb_behaviour`, `tb_positive`, `oapl`, and `tba_prime` with its three variants.
    """
    ratio, centre = log_ratio(s, objective), objective.parts.centre
    advantage = s.reward - reward_baseline(s, objective, beta) - beta * ratio
    # centre none: 0. Kimi k1.5, arXiv 2501.12599; with the other baseline OAPL, arXiv 2602.19362
    if centre == "none":
        return advantage
    # centre theta: mean l. VarGrad, arXiv 2503.18929 Eq. 5 times beta / 2
    advantage = advantage + beta * group_mean(ratio, s.group)
    # centre behaviour: mean l - d, the group mean under the behaviour policy. TBA' (the paper's experiments).
    # VarGrad does not change when one constant is added to every l_j of a group, so it cannot see the drift that all
    # completions of a prompt share. d = mean (log pi_theta - log pi_behaviour) is a trust region on that drift.
    if centre == "behaviour":
        # under a fixed stale behaviour policy d is biased: rollouts beyond the age limit keep the centre theta
        young = s.policy_age <= objective.parts.centre_max_age_steps
        drift = group_mean(_drift(s, objective), s.group, where=young)
        advantage = advantage - beta * drift * young
    return advantage


def reward_baseline(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """Return V of each rollout's group."""
    if objective.parts.reward_baseline == "mean":
        return group_mean(s.reward, s.group)
    # beta log mean exp(r / beta), the optimal value of a KL-regularised group; minus the maximum, so that exp is finite
    _, highest = group_extremes(s.reward, s.group)
    return highest + beta * group_mean(((s.reward - highest) / beta).exp(), s.group).log()


def grpo(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """(r - group mean) / the group's standard deviation - beta (l - group mean). GRPO, arXiv 2402.03300."""
    reward, kl = _centred(s.reward, s), _centred(_kl(s, objective, beta), s)
    size = group_size(s.reward, s.group)
    variance = group_mean(reward.square(), s.group) * size / (size - 1).clamp(min=1)  # Bessel's correction
    # the KL is not divided: otherwise beta would cancel in a group of equal rewards, and the KL be divided by its noise
    return reward / (variance.sqrt() + STD_EPSILON) - kl


def dr_grpo(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """r' - group mean. Dr. GRPO, arXiv 2503.20783."""
    return _centred(s.reward, s) - _centred(_kl(s, objective, beta), s)


def rloo(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """r' - mean of the others of the group. RLOO, arXiv 2402.14740."""
    # r' - (K mean - r') / (K - 1) = (r' - mean) K / (K - 1)
    size = group_size(s.reward, s.group)
    return dr_grpo(s, objective, beta) * size / (size - 1).clamp(min=1)


def ppo(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """(r - group mean) / its standard deviation over the batch - beta (l - group mean).

    PPO, arXiv 1707.06347, with the group mean in place of a value model.
    """
    reward, kl = _centred(s.reward, s), _centred(_kl(s, objective, beta), s)
    variance = reward.square().sum() / max(len(reward) - 1, 1)
    return reward / (variance.sqrt() + STD_EPSILON) - kl  # the KL is not divided, as in `grpo`


def reinforce(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """r' - batch mean. The only kind that learns from the reward of a rollout alone in its group."""
    reward = s.reward - _kl(s, objective, beta)
    return reward - reward.mean()


def online_dpo(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """+sigmoid(-beta (l_best - l_worst)) for the best of the group, -sigmoid(...) for the worst, 0 for the others.

    Online DPO, arXiv 2402.04792, in A-form: the DPO loss divided by beta.
    """
    lowest, highest = group_extremes(s.reward, s.group)
    differs = highest > lowest  # a group whose rewards are all equal is skipped
    row, column = group_grid(s.group)
    shape = (int(row.max()) + 1, int(column.max()) + 1)

    def grid(values: Tensor) -> Tensor:
        return values.new_zeros(shape).index_put((row, column), values)  # [G, K]

    best, worst = grid(differs & (s.reward == highest)), grid(differs & (s.reward == lowest))
    ratio = grid(log_ratio(s, objective))
    # several rollouts may share the highest or lowest reward: every pair counts, and the pairs of a group share its
    # weight (the expectation over a random choice among them)
    pairs = (best[:, :, None] & worst[:, None, :]).to(ratio.dtype)  # [G, K, K]
    pairs = pairs / pairs.sum(dim=(1, 2), keepdim=True).clamp(min=1)
    pull = pairs * torch.sigmoid(-beta * (ratio[:, :, None] - ratio[:, None, :]))
    return (pull.sum(dim=2) - pull.sum(dim=1))[row, column]


def raft(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """s_j - beta (l - group mean) / K. RAFT, arXiv 2304.06767.

    s_j is 1 / (number of best) for the best of the group, and 0 for the others or if all rewards are equal.
    """
    lowest, highest = group_extremes(s.reward, s.group)
    # where all rewards are equal nothing was found that is better than the rest
    best = ((highest > lowest) & (s.reward == highest)).to(s.reward.dtype)
    # rollouts that share the highest reward share the weight of their group
    share = best / (group_mean(best, s.group) * group_size(best, s.group)).clamp(min=1.0)
    # the divisor counts groups: the KL of a group is the mean over its members
    return share - _centred(_kl(s, objective, beta), s) / group_size(share, s.group)


ADVANTAGES: MappingProxyType[Kind, Callable[[Sequences, Objective, float], Tensor]] = MappingProxyType(
    {
        "trajectory_balance": trajectory_balance,
        "group": dr_grpo,
        "group_std": grpo,
        "leave_one_out": rloo,
        "batch_std": ppo,
        "batch": reinforce,
        "best_worst": online_dpo,
        "best": raft,
    }
)
"""A_j by `Parts.kind`. In a group of one the reward adds 0 to A_j in every kind but `batch`."""


def log_ratio(s: Sequences, objective: Objective) -> Float[Tensor, " N"]:
    """Return l_j, the log-ratio of theta to the objective's anchor."""
    if objective.anchor == "behaviour":
        return behaviour_log_ratio(s, objective)
    return s.ref_log_ratio


def behaviour_log_ratio(s: Sequences, objective: Objective) -> Float[Tensor, " N"]:
    """Return the log-ratio of theta to the behaviour policy, clamped and divided by the policy age if `age_scaled`."""
    ratio = s.logprob - s.sampler_logprob
    if objective.parts.age_scaled:
        # Divided by the age it stands for the log-ratio to a moving average of theta: with log pi moving steadily, the
        # two differ by a factor, which is part of beta here. The clamp keeps one odd rollout from ruling a batch.
        ratio = ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP) / s.policy_age.clamp(min=1)
    return ratio


def _drift(s: Sequences, objective: Objective) -> Float[Tensor, " N"]:
    """Return l_j minus its value with the behaviour policy in the place of theta."""
    if objective.anchor == "behaviour" or not objective.clamps_tokens:
        return behaviour_log_ratio(s, objective)
    # with clamped tokens the log-probs of the reference do not cancel
    return s.ref_log_ratio - s.sampler_ref_log_ratio


def _kl(s: Sequences, objective: Objective, beta: float) -> Float[Tensor, " N"]:
    """Return beta l_j, or zeros for a baseline without KL."""
    return torch.zeros_like(s.reward) if objective.anchor is None else beta * log_ratio(s, objective)


def _centred(values: Float[Tensor, " N"], s: Sequences) -> Float[Tensor, " N"]:
    return values - group_mean(values, s.group)


def group_mean(
    values: Float[Tensor, " N"], group: Int[Tensor, " N"], where: Bool[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """Return the mean of each rollout's group, over the members where `where` holds (0 for a group with none)."""
    index, num_groups = _renumber(group)
    weight = torch.ones_like(values) if where is None else where.to(values.dtype)
    total = values.new_zeros(num_groups).index_add(0, index, values * weight)
    count = values.new_zeros(num_groups).index_add(0, index, weight)
    return (total / count.clamp(min=1.0))[index]


def group_size(values: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the number of members of each rollout's group, in the dtype of `values`."""
    index, num_groups = _renumber(group)
    return values.new_zeros(num_groups).index_add(0, index, torch.ones_like(values))[index]


def group_extremes(
    values: Float[Tensor, " N"], group: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return the lowest and the highest value of each rollout's group."""
    index, num_groups = _renumber(group)
    lowest = values.new_zeros(num_groups).scatter_reduce(0, index, values, "amin", include_self=False)
    highest = values.new_zeros(num_groups).scatter_reduce(0, index, values, "amax", include_self=False)
    return lowest[index], highest[index]


def group_grid(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Return row and column of each rollout in a grid with one row per group and one column per member."""
    index, num_groups = _renumber(group)
    order = index.argsort(stable=True)
    sizes = torch.bincount(index, minlength=num_groups)
    first = sizes.cumsum(0) - sizes
    column = torch.empty_like(index)
    column[order] = torch.arange(len(index), device=index.device) - first[index[order]]
    return index, column


def reward_spread(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> dict[str, float]:
    """Return how rewards differ within groups, by the names of TRL.

    `reward_std` is the mean over groups of the deviation (n - 1). `frac_reward_zero_std` is the share of groups whose
    rewards are all equal, from which (nearly) nothing is learned.
    """
    size = group_size(reward, group)
    variance = group_mean((reward - group_mean(reward, group)).square(), group) * size / (size - 1).clamp(min=1)
    num_groups = (1 / size).sum()
    return {
        "reward_std": float((variance.sqrt() / size).sum() / num_groups),
        "frac_reward_zero_std": float((is_tied(reward, group) / size).sum() / num_groups),
    }


def is_tied(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    """Return whether the rewards of each rollout's group are all equal."""
    lowest, highest = group_extremes(reward, group)
    return lowest == highest


def _renumber(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], int]:
    """Return group numbers from 0 to G - 1, and G."""
    values, index = group.unique(return_inverse=True)
    return index, len(values)
