"""The loss of one micro-batch, from advantages and token log-probs.

    loss = -(1 / denominator) sum_j sum_t stopgrad(A_j w_jt [1 / |y_j|]) log pi_theta(y_jt)

with rho = pi_theta / pi_behaviour, per token or as the product over the rollout, and w:

    none            1                                       tb, kimi, RLOO, REINFORCE, online DPO
    clamp           min(rho_jt, importance_clamp)           tba_prime (arXiv 2503.18929), Dr. GRPO
    token_clip      rho_jt, 0 where PPO's clip is active    GRPO, PPO (arXiv 1707.06347)
    sequence_clip   rho_j, 0 where PPO's clip is active     proximal RLOO

Only the gradient of such a loss means something: its value is not that of the surrogate.

An objective from outside is one function (`ObjectiveFunction`), which `objective.preset` names by import path or entry
point; it takes the place of advantages and weights (`custom_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.errors import TbaError
from tba_trainer.objectives.advantages import Sequences
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


class ObjectiveFunction(Protocol):
    """An objective: a pure function from log-probs and rewards to loss terms, named by `objective.preset`.

    It is called once per micro-batch, in every process of the trainer. All tensors are on one device:

    * `sequences` is the whole batch of N rollouts, without gradient: sums of log-probs of theta, sampler and reference,
      rewards, policy ages, group numbers (`advantages.py` has `group_mean` and the like). The reference is there where
      `objective.beta` is above 0 at some step; else its log-probs are zeros.
    * `tokens` holds the response tokens of the micro-batch: `tokens.logprobs` of theta, with gradient, and
      `tokens.sampler_logprobs`. `tokens.row` is the rollout of each token, as an index into `sequences`.
    * `settings` holds the section `[objective]`: `clip_range`, `importance_clamp`, `log_ratio_clamp` and
      `centre_max_age_steps` are free for any use.
    * `beta` is the KL coefficient of this step.

    The loss of a batch is the sum of all terms divided by the number of its rollouts; gradients flow through
    `tokens.logprobs` alone. A term may depend on its own tokens and on `sequences`, never on the other tokens of the
    micro-batch, so that the gradient does not depend on how a batch is cut.

    Theta's sums are computed for the whole batch first: a pass without gradient, about a third of a step more, where
    the batch takes more than one micro-batch.
    """

    def __call__(self, sequences: Sequences, tokens: Tokens, settings: Objective, beta: float) -> Float[Tensor, " T"]:
        """Return the loss term of each token."""
        ...


def custom_loss(
    tokens: Tokens,
    rows: Int[Tensor, " B"],
    sequences: Sequences,
    objective: Objective,
    *,
    beta: float,
    totals: Totals,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Return the loss of one micro-batch, and `loss` as its metric; both are shares of the whole batch.

    Args:
        tokens: of the micro-batch; without rollouts, of a filler.
        rows: the index in `sequences` of each rollout of the micro-batch; may be empty.

    Raises:
        TbaError: the function did not return one term per token, with gradient.
    """
    if not len(rows):
        return 0.0 * tokens.logprobs.sum(), {"loss": 0.0}  # other ranks wait in the backward pass of the filler
    assert objective.function is not None
    device = tokens.logprobs.device
    everywhere: Any = {each.name: getattr(sequences, each.name).to(device) for each in fields(sequences)}
    of_batch = replace(tokens, row=rows.to(device)[tokens.row], num_rows=len(sequences.reward))
    terms = objective.function(Sequences(**everywhere), of_batch, objective, beta)
    if not isinstance(terms, Tensor) or terms.shape != tokens.logprobs.shape or not terms.requires_grad:
        found = f"shape {list(terms.shape)}, gradient {terms.requires_grad}" if isinstance(terms, Tensor) else terms
        raise TbaError(
            f"objective.preset {objective.name!r} returned {found!s:.100}; it must return one loss term for each of "
            f"the {len(tokens.logprobs)} tokens, a tensor with the gradient of tokens.logprobs"
        )
    loss = terms.to(tokens.logprobs.dtype).sum() / totals.num_rollouts
    return loss, {"loss": float(loss.detach())}
