"""Token weights w_jt of every objective, without gradient.

With rho = pi_theta / pi_old of a token, clamp = `importance_clamp`, and the first column `importance_weight`:

    none                1
    clamp               min(rho, clamp)                         tba_prime, dr_grpo_clamp; CISPO, arXiv 2506.13585
    mask                rho, but 0 where rho > clamp            tba_prime_published: a clamp inside autograd
    token_clip          rho, but 0 where PPO's clip is active   tba_prime_clip; GRPO, Dr. GRPO, PPO, arXiv
                                                                1707.06347; DAPO's "clip-higher", arXiv 2503.14476
    sequence_clip       token_clip; product of rho over rollout proximal RLOO
    sequence_mean_clip  token_clip; geometric mean over rollout GSPO, arXiv 2507.18071
    second_moment       rho, but 0 for the tokens with the      M2PO, arXiv 2510.01161, over all tokens as in
                        largest (log rho)^2, as few as bring    AReaL; its authors' code looks only at those that
                        the mean of the rest below its limit    PPO's clip could mask

Shapes: T trained tokens of B rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.config.objective import CLIPS
from tba_trainer.objectives.objective import Objective

SECOND_MOMENT_LIMIT = 0.04
"""Largest mean of (log rho)^2 over the tokens that `second_moment` keeps, as published."""
MAX_LOG_WEIGHT = 40.0
"""Cap on log rho, so that a product with 0 or another large number stays finite in float32; no sane step gets there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The T trained tokens of the B rollouts of one micro-batch, rollout after rollout."""

    logprobs: Float[Tensor, " T"]
    """log pi_theta per token, with gradient."""
    sampler_logprobs: Float[Tensor, " T"]
    row: Int[Tensor, " T"]
    """Rollout of each token, from 0 to num_rows - 1."""
    num_rows: int
    """B."""
    trainer_logprobs: Float[Tensor, " T"] | None = None
    """The log-probs of the policy that sampled, computed again by the trainer; None: they were not."""
    num_untrained: Int[Tensor, " B"] | None = None
    """The other tokens of each rollout: prompt and environment. Read by the aggregation `whole_sequence_mean`."""
    kept: Bool[Tensor, " B"] | None = None
    """False for rollouts that add nothing to the gradient (`mask_truncated`, `mask_tied`); None: all rollouts add."""

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Trained tokens of each rollout."""
        # no bincount: it waits for the device
        zeros = torch.zeros(self.num_rows, dtype=torch.int64, device=self.row.device)
        return zeros.index_add(0, self.row, torch.ones_like(self.row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Numbers of the whole batch, over all micro-batches and ranks, that the loss of a micro-batch needs."""

    num_rollouts: int
    num_tokens: int
    """Trained tokens."""
    num_groups: int
    max_second_moment: float = float("inf")
    """Tokens with a larger (log rho)^2 are masked (`second_moment_cut`)."""


def token_weights(
    tokens: Tokens, advantage: Float[Tensor, " T"], objective: Objective, *, totals: Totals
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return w_jt, and two masks of tokens whose rho is clipped, clamped or masked: for being too small, and too large.

    Args:
        advantage: A_j of each token's rollout; its sign decides where PPO's clip is active.
    """
    log_rho, kind = log_ratios(tokens, objective), objective.parts.importance_weight
    nowhere = torch.zeros_like(log_rho, dtype=torch.bool)
    if kind == "none":
        return torch.ones_like(log_rho), nowhere, nowhere
    if kind in CLIPS:
        return _clipped(tokens, log_rho, advantage, objective)
    rho = _exp(log_rho)
    high = log_rho.square() > totals.max_second_moment if kind == "second_moment" else rho > objective.importance_clamp
    weight = rho.clamp(max=objective.importance_clamp) if kind == "clamp" else rho.masked_fill(high, 0.0)
    return weight, nowhere, high


def log_ratios(tokens: Tokens, objective: Objective) -> Float[Tensor, " T"]:
    """Return log rho of every token, without gradient."""
    old = tokens.trainer_logprobs if objective.parts.old_policy == "trainer" else tokens.sampler_logprobs
    assert old is not None, 'the old policy "trainer" needs `Tokens.trainer_logprobs`'
    return tokens.logprobs.detach() - old


def second_moment_cut(squares: Float[Tensor, " T"], limit: float = SECOND_MOMENT_LIMIT) -> float:
    """Return the bound of (log rho)^2 that keeps the most tokens with a mean below `limit`; -1 if it keeps none.

    Args:
        squares: (log rho)^2 of all tokens of the batch.
        limit: bound of the mean.
    """
    ascending = squares.sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)  # [T]
    # means of ascending numbers ascend: those below the limit are the first ones
    num_kept = int((means < limit).sum())
    return float(ascending[num_kept - 1]) if num_kept else -1.0


def _clipped(
    tokens: Tokens, log_rho: Float[Tensor, " T"], advantage: Float[Tensor, " T"], objective: Objective
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the weights of PPO's clip, and the masks of the tokens below and above its range where it is active."""
    kind = objective.parts.importance_weight
    if kind != "token_clip":
        of_rollout = log_rho.new_zeros(tokens.num_rows).index_add(0, tokens.row, log_rho)  # [B]
        if kind == "sequence_mean_clip":
            of_rollout = of_rollout / tokens.lengths.clamp(min=1)
        log_rho = of_rollout[tokens.row]
    rho = _exp(log_rho)
    # The gradient of the clipped surrogate min(rho A, clip(rho, 1 - c, 1 + c') A). Inside the clip it is that of rho A,
    # rho A grad log pi. Where the clipped branch is the smaller one, the surrogate is constant and the gradient 0: the
    # clip is active where rho would take A further.
    low = (advantage < 0) & (rho < 1 - objective.parts.clip_range)
    high = (advantage > 0) & (rho > 1 + objective.parts.clip_range_high)
    return rho.masked_fill(low | high, 0.0), low, high


def _exp(log_weight: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    return log_weight.clamp(max=MAX_LOG_WEIGHT).exp()
