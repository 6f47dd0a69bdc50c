"""Objectives from outside: the function that `objective.preset` names by import path or entry point."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from tba.errors import TbaError
from tba_trainer.objectives.advantages import Sequences
from tba_trainer.objectives.loss import Tokens, Totals
from tba_trainer.objectives.objective import Objective


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
