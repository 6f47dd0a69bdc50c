"""The loss of one micro-batch, from advantages and token log-probs.

    loss = -(1 / denominator) sum_j sum_t stopgrad(A_j w_jt [1 / |y_j|]) log pi_theta(y_jt)

with rho = pi_theta / pi_behaviour, per token or as the product over the rollout, and w:

    none            1                                       tb, kimi, RLOO, REINFORCE, online DPO
    clamp           min(rho_jt, importance_clamp)           tba_prime (arXiv 2503.18929), Dr. GRPO
    token_clip      rho_jt, 0 where PPO's clip is active    GRPO, PPO (arXiv 1707.06347)
    sequence_clip   rho_j, 0 where PPO's clip is active     proximal RLOO

Only the gradient of such a loss means something: its value is not that of the surrogate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba_trainer.objectives.objective import Objective

MAX_LOG_WEIGHT = 40.0
"""Cap on log rho, so that a product with 0 or another large number stays finite in float32; no sane step gets there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The T response tokens of the B rollouts of one micro-batch, rollout after rollout."""

    logprobs: Float[Tensor, " T"]
    """log pi_theta per token, with gradient."""
    sampler_logprobs: Float[Tensor, " T"]
    row: Int[Tensor, " T"]
    """Rollout of each token, from 0 to num_rows - 1."""
    num_rows: int
    """B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of the whole batch, over all micro-batches and ranks: the denominators."""

    num_rollouts: int
    num_tokens: int
    """Response tokens."""
    num_groups: int


def objective_loss(
    tokens: Tokens, advantage: Float[Tensor, " B"], objective: Objective, *, totals: Totals
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Return the loss of one micro-batch and its metrics. Both are shares of the whole batch: they add up.

    Args:
        advantage: A_j of the B rollouts, from `advantages`.

    Returns:
        The loss, and `loss`, `advantage_abs_mean`, `clipped_share` (tokens whose weight is clipped or clamped).
    """
    token_advantage = advantage.detach().to(tokens.logprobs.dtype)[tokens.row]  # [T]
    weight, clipped = token_weights(tokens, token_advantage, objective)
    if objective.token_mean:
        lengths = torch.bincount(tokens.row, minlength=tokens.num_rows)  # [B]
        weight = weight / lengths[tokens.row]
    denominator = {
        "rollouts": totals.num_rollouts,
        "groups": totals.num_groups,
        "tokens": totals.num_tokens,
    }[objective.denominator]
    loss = -(token_advantage * weight * tokens.logprobs).sum() / denominator
    sums = torch.stack([loss.detach(), advantage.detach().abs().sum().to(loss.dtype), clipped.sum().to(loss.dtype)])
    loss_value, absolute, num_clipped = sums.tolist()  # one wait for the device
    return loss, {
        "loss": loss_value,
        "advantage_abs_mean": absolute / totals.num_rollouts,
        "clipped_share": num_clipped / totals.num_tokens,
    }


def token_weights(
    tokens: Tokens, advantage: Float[Tensor, " T"], objective: Objective
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return w_jt without gradient, and where it is clipped or clamped."""
    logprobs = tokens.logprobs.detach()
    if objective.weight == "none":
        return torch.ones_like(logprobs), torch.zeros_like(logprobs, dtype=torch.bool)
    log_rho = logprobs - tokens.sampler_logprobs
    if objective.weight == "sequence_clip":
        log_rho = log_rho.new_zeros(tokens.num_rows).index_add(0, tokens.row, log_rho)[tokens.row]
    rho = log_rho.clamp(max=MAX_LOG_WEIGHT).exp()
    if objective.weight == "clamp":
        return rho.clamp(max=objective.importance_clamp), rho > objective.importance_clamp
    # The gradient of the clipped surrogate min(rho A, clip(rho, 1 - c, 1 + c) A). Inside the clip it is that of rho A,
    # rho A grad log pi. Where the clipped branch is the smaller one, the surrogate is constant and the gradient 0: the
    # clip is active where rho would take A further.
    low, high = 1 - objective.clip_range, 1 + objective.clip_range
    clipped = ((advantage > 0) & (rho > high)) | ((advantage < 0) & (rho < low))
    return rho.masked_fill(clipped, 0.0), clipped
