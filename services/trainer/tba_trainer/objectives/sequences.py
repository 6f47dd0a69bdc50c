"""What advantages are made from: rewards and sequence sums of log-probs."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from tba_trainer.objectives.resolved import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """N rollouts whose groups are complete. Log-probs are sums over response tokens, in nats, without gradient."""

    logprob: Float[Tensor, " N"]
    """log pi_theta at the policy temperature."""
    sampler_logprob: Float[Tensor, " N"]
    """log pi_behaviour at the rollout's own sampling temperature."""
    ref_logprob: Float[Tensor, " N"]
    """log pi_ref at the policy temperature; zeros where `Objective.needs_reference` is false."""
    reward: Float[Tensor, " N"]
    policy_age: Int[Tensor, " N"]
    """Optimizer steps."""
    group: Int[Tensor, " N"]
    """Rollouts of one prompt share a number; any numbers will do."""
    num_tokens: Int[Tensor, " N"]
    """Response tokens."""


def log_ratio(sequences: Sequences, objective: Objective) -> Float[Tensor, " N"]:
    """l_j, the log-ratio of theta to the anchor, as the KL term of the objective takes it.

    Scaled by age it stands in for the log-ratio to a moving average of theta, without a reference model: with log pi
    moving steadily, log pi_n - log EMA_n is about [decay / (Delta (1 - decay))] (log pi_n - log pi_{n - Delta}). The
    factor is part of beta here; the clamp keeps one odd rollout from ruling a batch.
    """
    s = sequences
    if objective.anchor == "behaviour":
        ratio = behaviour_log_ratio(s, objective)
    else:
        ratio = s.logprob - s.ref_logprob
        if objective.ratio_per_token:
            ratio = ratio / s.num_tokens
    return ratio


def behaviour_log_ratio(sequences: Sequences, objective: Objective) -> Float[Tensor, " N"]:
    """The log-ratio of theta to the behaviour policy; clamped and divided by the age where the objective says so."""
    ratio = sequences.logprob - sequences.sampler_logprob
    if objective.age_scaled:
        limit = objective.log_ratio_clamp
        ratio = ratio.clamp(-limit, limit) / sequences.policy_age.clamp(min=1)
    return ratio / sequences.num_tokens if objective.ratio_per_token else ratio
