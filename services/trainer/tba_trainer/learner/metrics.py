"""Metrics of a batch: rewards, policy age, and how far theta is from the behaviour policy.

ESS collapse and growth of the gradient norm announce divergence before the reward falls (arXiv 2602.17616). The metrics
of the behaviour policy are also taken per policy age, because old data collapses first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tba.wire import Rollout

AGE_BUCKETS = ((0, 0), (1, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))
"""First and last policy age of each bucket, in optimizer steps; None: no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Log-probs of one rollout from the forward pass: sums over the response, in nats."""

    rollout: Rollout
    policy_age: int
    logprob: float
    ref_logprob: float | None
    """None where the objective needs no reference."""
    abs_gap: float
    """Sum over tokens of |trainer log-prob - sampler log-prob|."""


def ess_ratio(log_weights: NDArray[np.float64]) -> float | None:
    """Return the effective sample size of importance weights per weight, (sum w)^2 / (N sum w^2), in (0, 1].

    None: a weight is NaN or infinite.
    """
    if not np.isfinite(log_weights).all():
        return None
    weights = np.exp(log_weights - log_weights.max())  # a common factor cancels, and exp cannot overflow
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def bucket_name(policy_age: int) -> str:
    """Return the bucket of a policy age as a part of metric names: `0`, `1_2`, ..., `33_up`."""
    first, last = next(bucket for bucket in reversed(AGE_BUCKETS) if policy_age >= bucket[0])
    return f"{first}_up" if last is None else str(first) if first == last else f"{first}_{last}"


def age_metrics(scored: Sequence[ForwardResult]) -> dict[str, float | None]:
    """Return metrics per bucket B of policy ages that occur.

    `ess_age_B`, `log_ratio_mean_age_B` (nats per rollout), `log_ratio_token_abs_age_B` (mean |trainer - sampler
    log-prob| of a token, nats) and `num_rollouts_age_B`.
    """
    buckets: dict[str, list[ForwardResult]] = {}
    for item in sorted(scored, key=lambda item: item.policy_age):
        buckets.setdefault(bucket_name(max(0, item.policy_age)), []).append(item)
    metrics: dict[str, float | None] = {}
    for name, items in buckets.items():
        log_ratio = _log_ratios(items)
        metrics[f"ess_age_{name}"] = ess_ratio(log_ratio)
        metrics[f"log_ratio_mean_age_{name}"] = _known(log_ratio.mean())
        metrics[f"log_ratio_token_abs_age_{name}"] = _known(sum(item.abs_gap for item in items) / _num_tokens(items))
        metrics[f"num_rollouts_age_{name}"] = float(len(items))
    return metrics


def batch_metrics(
    scored: Sequence[ForwardResult],
    *,
    success_reward: float,
    policy_temperature: float,
    tasks_with_minimum: Collection[str] = (),
) -> dict[str, float | None]:
    """Return the metrics of one batch, taken at theta before the update.

    `logprob_gap_on_policy` is the mean |trainer - sampler log-prob| per token over rollouts of policy age 0 that were
    sampled from the whole distribution at the policy temperature; None without such rollouts.

    Args:
        tasks_with_minimum: tasks with a minimum length, below which searchers cannot sample end of sequence.
    """
    rewards = np.array([s.rollout.reward for s in scored], dtype=np.float64)
    ages = np.array([s.policy_age for s in scored])
    log_ratio = _log_ratios(scored)
    # for these rollouts trainer and sampler must agree: the same weights, the same distribution
    on_policy = [
        s
        for s in scored
        if s.policy_age == 0 and s.rollout.task not in tasks_with_minimum and _is_policy(s.rollout, policy_temperature)
    ]
    gap = _known(sum(s.abs_gap for s in on_policy) / _num_tokens(on_policy)) if on_policy else None
    return {
        "reward_mean": float(rewards.mean()),
        "accuracy": float((rewards >= success_reward).mean()),
        "policy_age_mean": float(ages.mean()),
        "policy_age_max": float(ages.max()),
        "ess": ess_ratio(log_ratio),
        "log_ratio_mean": _known(log_ratio.mean()),
        "log_ratio_token_mean": _known(log_ratio.sum() / _num_tokens(scored)),
        "kl_to_ref": _kl_to_ref(scored),
        "logprob_gap_on_policy": gap,
        "num_rollouts": float(len(scored)),
        "num_tokens": float(_num_tokens(scored)),
        "num_unique_rollouts": float(len({s.rollout.response_tokens.tobytes() for s in scored})),
        **age_metrics(scored),
    }


def _log_ratios(scored: Sequence[ForwardResult]) -> NDArray[np.float64]:
    """Return log pi_theta - log pi_behaviour of every rollout, in nats. [N]"""
    return np.array([s.logprob - float(s.rollout.sampler_logprobs.sum(dtype=np.float64)) for s in scored])


def _kl_to_ref(scored: Sequence[ForwardResult]) -> float | None:
    differences = [s.logprob - s.ref_logprob for s in scored if s.ref_logprob is not None]
    return _known(np.mean(differences)) if len(differences) == len(scored) else None


def _num_tokens(scored: Sequence[ForwardResult]) -> int:
    return sum(len(s.rollout.response_tokens) for s in scored)


def _known(value: float | np.floating) -> float | None:
    """Return a finite number, or None for any other."""
    return float(value) if math.isfinite(value) else None


def _is_policy(rollout: Rollout, policy_temperature: float) -> bool:
    sampling = rollout.sampling
    return sampling.temperature == policy_temperature and sampling.top_p == 1.0 and sampling.top_k == 0
