"""What a batch says about itself: rewards, policy age, and how far theta is from the behaviour policy.

ESS collapse and growth of the gradient norm announce divergence before the reward falls (arXiv 2602.17616).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.wire import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """What the forward pass found out about one rollout. Sums over the response, in nats."""

    rollout: Rollout
    policy_age: int
    logprob: float
    ref_logprob: float
    abs_gap: float
    """Sum over tokens of |trainer log-prob - sampler log-prob|."""


def ess_ratio(log_weights: NDArray[np.float64]) -> float:
    """Effective sample size of importance weights divided by their number: (sum w)^2 / (N sum w^2), in (0, 1]."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def batch_metrics(
    scored: Sequence[ScoredRollout], *, success_reward: float, policy_temperature: float
) -> dict[str, float | None]:
    """Metrics of one batch, taken at theta before the update.

    `logprob_gap_on_policy` is the mean |trainer - sampler log-prob| per token over rollouts of policy age 0 that were
    sampled from the whole distribution at the policy temperature: there the two must agree. None without such rollouts.
    """
    rewards = np.array([s.rollout.reward for s in scored], dtype=np.float64)
    ages = np.array([s.policy_age for s in scored])
    log_ratio = np.array([s.logprob - float(s.rollout.sampler_logprobs.sum(dtype=np.float64)) for s in scored])
    on_policy = [s for s in scored if s.policy_age == 0 and _is_policy(s.rollout, policy_temperature)]
    num_on_policy_tokens = sum(len(s.rollout.response_tokens) for s in on_policy)
    gap = sum(s.abs_gap for s in on_policy) / num_on_policy_tokens if on_policy else None
    return {
        "reward_mean": float(rewards.mean()),
        "accuracy": float((rewards >= success_reward).mean()),
        "policy_age_mean": float(ages.mean()),
        "policy_age_max": float(ages.max()),
        "ess": ess_ratio(log_ratio),
        "log_ratio_mean": float(log_ratio.mean()),
        "kl_to_ref": float(np.mean([s.logprob - s.ref_logprob for s in scored])),
        "logprob_gap_on_policy": gap,
        "num_rollouts": float(len(scored)),
        "num_tokens": float(sum(len(s.rollout.response_tokens) for s in scored)),
        "num_unique_rollouts": float(len({s.rollout.response_tokens.tobytes() for s in scored})),
    }


def _is_policy(rollout: Rollout, policy_temperature: float) -> bool:
    sampling = rollout.sampling
    return sampling.temperature == policy_temperature and sampling.top_p == 1.0 and sampling.top_k == 0
