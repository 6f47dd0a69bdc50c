"""The loss of one micro-batch, from advantages and token log-probs.

    loss = -sum_j sum_t stopgrad(A_j w_jt / divisor_j) log pi_theta(y_jt)

with w from clipping.py. A batch has N rollouts with T trained tokens in all; rollout j has |x_j| other tokens
(prompt, environment) and |y_j| trained ones. `divisor_j` is, by the objective's `aggregation`:

    groups               the number of groups   online DPO, arXiv 2402.04792; RAFT, arXiv 2304.06767
    rollouts             N                      the sum over the tokens of a rollout, as in Eq. 5 of arXiv 2503.18929
    tokens               T                      DAPO, arXiv 2503.14476
    sequence_mean        N |y_j|                GRPO, arXiv 2402.03300
    whole_sequence_mean  N (|x_j| + |y_j|)      the published code of TBA', whose prompts count in the divisor
    constant             N x a fixed number     Dr. GRPO, arXiv 2503.20783

Only the gradient of such a loss means something: its value is not that of the surrogate.

A user's own objective is one function (`ObjectiveFunction`), which `objective.preset` names by import path or entry
point. It takes the place of advantages and weights (`custom_loss`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba.errors import TbaError
from tba_trainer.objectives.advantages import Sequences
from tba_trainer.objectives.clipping import Tokens, Totals, token_weights
from tba_trainer.objectives.objective import Objective


def objective_loss(
    tokens: Tokens, advantage: Float[Tensor, " B"], objective: Objective, *, totals: Totals
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]], Float[Tensor, " B"]]:
    """Return the loss of one micro-batch, its metrics, and the mean weight of each rollout.

    Loss and metrics are shares of the whole batch: they add up over micro-batches. Everything stays on the device, and
    the host does not wait for it.

    Args:
        advantage: A_j of the B rollouts, from `advantages`.

    Returns:
        The loss; the metrics `loss`, `advantage_abs_mean`, `clipped_share` (tokens whose rho is clipped, clamped or
        masked) and `clipped_high_share` (because it is large), in float64; and the mean of w_jt over the tokens of each
        rollout [B], 0 where `tokens.kept` is False.
    """
    token_advantage = advantage.detach().to(tokens.logprobs.dtype)[tokens.row]  # [T]
    weight, low, high = token_weights(tokens, token_advantage, objective, totals=totals)
    factor = token_advantage * weight
    bounded = torch.stack([low | high, high])  # [2, T]
    mean_weight = _row_means(weight, tokens)  # [B]
    if tokens.kept is not None:
        factor, bounded = factor * tokens.kept[tokens.row], bounded & tokens.kept[tokens.row]
        advantage, mean_weight = advantage * tokens.kept, mean_weight * tokens.kept
    loss = -(factor / _divisor(tokens, objective, totals) * tokens.logprobs).sum()
    counts = bounded.sum(dim=1).to(loss.dtype)
    loss_value, absolute = (value.detach().double() for value in (loss, advantage.abs().sum().to(loss.dtype)))
    num_clipped, num_high = counts.double()
    num_tokens = max(1, totals.num_tokens)
    metrics = {
        "loss": loss_value,
        "advantage_abs_mean": absolute / max(1, totals.num_rollouts),
        "clipped_share": num_clipped / num_tokens,
        "clipped_high_share": num_high / num_tokens,
    }
    return loss, metrics, mean_weight


def _row_means(values: Float[Tensor, " T"], tokens: Tokens) -> Float[Tensor, " B"]:
    """Return the mean over the tokens of each rollout, in float64."""
    zeros = torch.zeros(tokens.num_rows, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, tokens.row, values.double()) / tokens.lengths.clamp(min=1)


def _divisor(tokens: Tokens, objective: Objective, totals: Totals) -> Float[Tensor, " T"] | int:
    """Return the divisor of each token's term."""
    kind, num_rollouts = objective.parts.aggregation, max(1, totals.num_rollouts)
    if kind == "rollouts":
        return num_rollouts
    if kind == "groups":
        return max(1, totals.num_groups)
    if kind == "tokens":
        return max(1, totals.num_tokens)
    if kind == "constant":
        return num_rollouts * objective.aggregation_tokens
    lengths = tokens.lengths
    if kind == "whole_sequence_mean":
        assert tokens.num_untrained is not None, "`whole_sequence_mean` needs the lengths of prompts"
        lengths = lengths + tokens.num_untrained
    return num_rollouts * lengths[tokens.row].to(tokens.logprobs.dtype)


class ObjectiveFunction(Protocol):
    """An objective: a pure function from log-probs and rewards to loss terms, named by `objective.preset`.

    It is called once per micro-batch, in every process of the trainer. All tensors are on one device:

    * `sequences` is the whole batch of N rollouts, without gradient: sums of log-probs of theta, sampler and reference,
      rewards, policy ages, group numbers (`advantages.py` has `group_mean` and the like). Ref log-probs are zeros if
      `objective.beta` is 0 at every step.
    * `tokens` holds the trained tokens of the micro-batch: `tokens.logprobs` of theta, with gradient, and
      `tokens.sampler_logprobs`. `tokens.row` is the rollout of each token, as an index into `sequences`.
    * `settings` is the resolved section `[objective]`; its `importance_clamp` is free for any use.
    * `beta` is the KL coefficient of this step.

    The loss of a batch is the sum of all terms divided by the number of its rollouts; gradients flow through
    `tokens.logprobs` alone. A term may depend on its own tokens and on `sequences`, never on the other tokens of the
    micro-batch, so that the gradient does not depend on how a batch is cut.

    If the batch takes several micro-batches, a pass without gradient computes theta's sums of the whole batch first. It
    makes a step about a third longer.
    """

    def __call__(self, sequences: Sequences, tokens: Tokens, settings: Objective, beta: float) -> Float[Tensor, " T"]:
        """Return the loss term of each token."""
        ...


def custom_loss(
    tokens: Tokens, rows: Int[Tensor, " B"], sequences: Sequences, objective: Objective, *, beta: float, totals: Totals
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Return a micro-batch's loss under the user's function, and the metric `loss`; both are shares of the whole batch.

    Args:
        tokens: tokens of the micro-batch. If it has no rollouts, those of a filler (`pack_rollouts`).
        rows: the index in `sequences` of each rollout of the micro-batch; may be empty.

    Raises:
        TbaError: the function did not return one term per token, with gradient.
    """
    if not len(rows):
        # other ranks wait in the backward pass of the filler
        return 0.0 * tokens.logprobs.sum(), {"loss": tokens.logprobs.new_zeros((), dtype=torch.float64)}
    assert objective.function is not None
    device = tokens.logprobs.device
    known = {each.name: getattr(sequences, each.name) for each in fields(sequences)}
    everywhere: Any = {
        name: None if value is None else value.to(device, non_blocking=True) for name, value in known.items()
    }
    # the rows of the batch: what the micro-batch knows per rollout of its own does not fit them
    of_batch = replace(
        tokens,
        row=rows.to(device, non_blocking=True)[tokens.row],
        num_rows=len(sequences.reward),
        num_untrained=None,
        kept=None,
    )
    terms = objective.function(Sequences(**everywhere), of_batch, objective, beta)
    if not isinstance(terms, Tensor) or terms.shape != tokens.logprobs.shape or not terms.requires_grad:
        found = f"shape {list(terms.shape)}, gradient {terms.requires_grad}" if isinstance(terms, Tensor) else terms
        raise TbaError(
            f"objective.preset {objective.name!r} returned {found!s:.100}; it must return one loss term for each of "
            f"the {len(tokens.logprobs)} tokens, a tensor with the gradient of tokens.logprobs"
        )
    if tokens.kept is not None:
        terms = terms * tokens.kept[tokens.row]
    loss = terms.to(tokens.logprobs.dtype).sum() / max(1, totals.num_rollouts)
    return loss, {"loss": loss.detach().double()}
