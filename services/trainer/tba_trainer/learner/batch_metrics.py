"""Metrics of one batch, from the results of the forward pass for each rollout.

ESS collapse and growth of the gradient norm announce divergence before the reward falls (arXiv 2602.17616). Metrics
that compare theta with the behaviour policy are also computed per policy age, because old data collapses first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from tba.config import Recipe
from tba.fields import ParseStatus
from tba.versions import START
from tba.wire import Rollout
from tba_trainer.learner.forward_backward import ForwardResult

MAX_GAP = MappingProxyType({"float32": 0.05, "float16": 0.125, "bfloat16": 0.5})
"""Largest mean |trainer - sampler log-prob| of a token, in nats, with the same weights, by the coarser of both dtypes.
Measured with the right weights: up to 0.004 (float32, TF32), 0.006 (float16) and 0.12 (bfloat16, in a mixture of
experts; docs/trainer.md); with wrong attention or heads: 4 and more."""
MAX_GAP_EIGHT_BITS = 1.0
"""Largest mean gap with weights, keys or values in 8 bits. Measured: 0.64 in a random model, 0.03 in trained ones."""
FLIP = 8.0
"""Largest gap of one token, in nats: rounding can send the token to other experts (6.8 was measured)."""
MAX_PARTS = 24
"""Most tasks and scorers with metrics of their own, those with the most rewards: a heartbeat has a limit."""
MAX_ENVIRONMENTS = 6
"""Most environments with metrics of their own, those with the most episodes."""
AGE_BUCKETS = ((0, 0), (1, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))
"""First and last policy age of each bucket, in optimizer steps; None: no end."""


def gap_limit(recipe: Recipe) -> float | None:
    """Return the largest `logprob_gap_on_policy` that rounding explains; None: the simulated engine has no model."""
    if recipe.searcher.engine == "simulated":
        return None
    most = max(MAX_GAP[recipe.model.dtype], MAX_GAP[recipe.trainer.compute_dtype])
    has_8_bits = recipe.searcher.engine == "vllm" and recipe.searcher.vllm.quantization is not None
    return max(most, MAX_GAP_EIGHT_BITS) if has_8_bits else most


def ess_ratio(log_weights: NDArray[np.float64]) -> float | None:
    """Return the effective sample size of N importance weights divided by N: (sum w)^2 / (N sum w^2), in (0, 1].

    None: a log weight is NaN or infinite, or there are no weights.
    """
    if not len(log_weights) or not np.isfinite(log_weights).all():
        return None
    # Kish's effective sample size: 1 / N where one rollout rules the batch, 1 where all weigh the same.
    weights = np.exp(log_weights - log_weights.max())  # a common factor cancels, and exp cannot overflow
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def bucket_name(policy_age: int) -> str:
    """Return the bucket of a policy age as a part of metric names: `0`, `1_2`, ..., `33_up`."""
    first, last = next(bucket for bucket in reversed(AGE_BUCKETS) if policy_age >= bucket[0])
    return f"{first}_up" if last is None else str(first) if first == last else f"{first}_{last}"


def age_metrics(scored: Sequence[ForwardResult]) -> dict[str, float | None]:
    """Return metrics of each bucket B of policy ages that occurs in the batch.

    `num_rollouts_age_B` counts all rollouts. The others are over rollouts with a pass, None without any: `ess_age_B`,
    `log_ratio_mean_age_B` (nats per rollout), `log_ratio_token_abs_age_B` (mean |trainer - sampler log-prob|, nats).
    """
    buckets: dict[str, list[ForwardResult]] = {}
    for item in sorted(scored, key=lambda item: item.policy_age):
        buckets.setdefault(bucket_name(max(0, item.policy_age)), []).append(item)
    metrics: dict[str, float | None] = {}
    for name, items in buckets.items():
        passed = _passed(items)
        log_ratio = _log_ratios(passed)
        metrics[f"ess_age_{name}"] = ess_ratio(log_ratio)
        metrics[f"log_ratio_mean_age_{name}"] = _ratio(log_ratio.sum(), len(passed))
        metrics[f"log_ratio_token_abs_age_{name}"] = _ratio(sum(item.abs_gap for item in passed), _num_tokens(passed))
        metrics[f"num_rollouts_age_{name}"] = float(len(items))
    return metrics


def task_rewards(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """Return mean and deviation of the rewards of each task, and of each of its scorers where it has several.

    The names are TRL's: `rewards/TASK/mean`, `rewards/TASK/std`, `rewards/TASK/SCORER/mean`. A score that is not known
    (a gate was not passed) is left out.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            values[rollout.task].append(rollout.reward)
        for scorer, score in (rollout.reward_parts or {}).items():
            values[f"{rollout.task}/{scorer}"].append(score)
    found: dict[str, float | None] = {}
    for name, scores in sorted(values.items(), key=lambda pair: (-len(pair[1]), pair[0]))[:MAX_PARTS]:
        found[f"rewards/{name}/mean"] = float(np.mean(scores))
        found[f"rewards/{name}/std"] = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
    return found


def environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over the episodes of each environment, by its task; the names are TRL's (`tools/`) and prime-rl's.

    `decode_len` and `environment_len` are tokens of the policy and of the environment, over all sequences.
    `tools/ENV/STATUS_frequency` is the share of replies with calls whose call had this parse status.
    """
    by_name: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.episode is not None:
            by_name[rollout.task].append(rollout)
    found: dict[str, float] = {}
    for name, played in sorted(by_name.items(), key=lambda pair: (-len(pair[1]), pair[0]))[:MAX_ENVIRONMENTS]:
        num, segments = len(played), [part for each in played for seq in each.sequences for part in seq.segments]
        statuses = Counter(part.parse_status for part in segments if part.is_trained and part.parse_status)
        calls = sum(each.episode.num_tool_calls for each in played if each.episode is not None)
        num_tokens = sum(part.num_tokens for part in segments if part.origin == "environment")
        found[f"num_turns/{name}/mean"] = sum(each.num_replies for each in played) / num
        found[f"is_truncated/{name}/mean"] = sum(each.is_truncated for each in played) / num
        found[f"decode_len/{name}/mean"] = sum(each.num_sampled for each in played) / num
        found[f"environment_len/{name}/mean"] = num_tokens / num
        found[f"tools/{name}/call_frequency"] = calls / num
        for status in get_args(ParseStatus) if statuses else ():
            found[f"tools/{name}/{status}_frequency"] = statuses[status] / statuses.total()
    return found


def batch_metrics(
    scored: Sequence[ForwardResult],
    *,
    step: int,
    success_reward: float,
    policy_temperature: float,
    tasks_with_minimum: Collection[str] = (),
    max_gap: float | None = None,
    has_foreign_start: bool = False,
) -> dict[str, float | None]:
    """Return the metrics of one batch, taken at theta before the update.

    Metrics that depend on theta are over the rollouts with a forward pass, and None without any.

    `logprob_gap_on_policy` is the mean |trainer - sampler log-prob| per token over rollouts of policy age 0 that were
    sampled from the whole distribution at the policy temperature; None without such rollouts. `logprob_gap_limit` is
    the largest gap that rounding explains over that number of tokens.

    Args:
        scored: the rollouts of the batch, at least one.
        step: the optimizer step that the batch is for.
        success_reward: the lowest reward that counts as a success.
        policy_temperature: divides theta's logits.
        tasks_with_minimum: tasks with a minimum length, below which searchers cannot sample end of sequence.
        max_gap: result of `gap_limit`.
        has_foreign_start: rollouts of version 0-0 may come from a snapshot, and from another starting model.
    """
    rewards = np.array([s.rollout.reward for s in scored], dtype=np.float64)
    ages = np.array([s.policy_age for s in scored])
    passed = _passed(scored)
    log_ratio = _log_ratios(passed)

    def must_agree(s: ForwardResult) -> bool:
        """Return whether trainer and sampler have the same weights and the same distribution."""
        rollout, sampling = s.rollout, s.rollout.sampling
        return (
            s.policy_age == 0
            # after a rollback those of the weights that were left have age 0 too
            and all(span.version.step < step for span in rollout.version_spans)
            and not (has_foreign_start and rollout.version == START)
            and rollout.task not in tasks_with_minimum
            and (sampling.temperature, sampling.top_p, sampling.top_k) == (policy_temperature, 1.0, 0)
        )

    on_policy = [s for s in passed if must_agree(s)]
    to_ref = [s.logprob - s.ref_logprob for s in scored if s.logprob is not None and s.ref_logprob is not None]
    num_on_policy = _num_tokens(on_policy)
    return {
        "reward_mean": float(rewards.mean()),
        "accuracy": float((rewards >= success_reward).mean()),
        "policy_age_mean": float(ages.mean()),
        "policy_age_max": float(ages.max()),
        "ess": ess_ratio(log_ratio),
        "log_ratio_mean": _ratio(log_ratio.sum(), len(passed)),
        "log_ratio_token_mean": _ratio(log_ratio.sum(), _num_tokens(passed)),
        "kl_to_ref": _ratio(sum(to_ref), len(to_ref)),
        "logprob_gap_on_policy": _ratio(sum(s.abs_gap for s in on_policy), num_on_policy),
        "logprob_gap_limit": None if max_gap is None or not num_on_policy else max_gap + FLIP / num_on_policy,
        "num_rollouts": float(len(scored)),
        "num_tokens": float(_num_tokens(scored)),
        "completions/mean_length": _num_tokens(scored) / len(scored),
        "completions/clipped_ratio": float(np.mean([s.rollout.is_truncated for s in scored])),
        "num_unique_rollouts": float(len({s.rollout.response_tokens.tobytes() for s in scored})),
        **task_rewards([s.rollout for s in scored]),
        **environment_metrics([s.rollout for s in scored]),
        **age_metrics(scored),
    }


def _log_ratios(scored: Sequence[ForwardResult]) -> NDArray[np.float64]:
    """Return log pi_theta - log pi_behaviour of every rollout with a forward pass, in nats."""
    return np.array(
        [s.logprob - float(s.rollout.sampler_logprobs.sum(dtype=np.float64)) for s in scored if s.logprob is not None]
    )


def _passed(scored: Sequence[ForwardResult]) -> list[ForwardResult]:
    """Return the rollouts with a forward pass."""
    return [s for s in scored if s.logprob is not None]


def _ratio(total: float, num: int) -> float | None:
    """Return total / num, or None if `num` is 0 or the result is not finite."""
    return float(total / num) if num and math.isfinite(total / num) else None


def _num_tokens(scored: Sequence[ForwardResult]) -> int:
    return sum(s.rollout.num_sampled for s in scored)
