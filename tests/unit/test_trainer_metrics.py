"""Metrics of a batch, whole and per policy age."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tba_trainer.learner.forward_backward import AGE_BUCKETS, ForwardResult, batch_metrics, bucket_name, ess_ratio

from tests.support.trainer_values import make_rollout

RNG = np.random.default_rng(0)


def scored(age: int, log_ratio: float, *, num_tokens: int = 4, abs_gap: float = 1.0) -> ForwardResult:
    rollout = make_rollout(RNG, sampler_logprobs=np.full(num_tokens, -1.0), num_response_tokens=num_tokens)
    return ForwardResult(
        rollout=rollout, policy_age=age, logprob=log_ratio - num_tokens, ref_logprob=-9.0, abs_gap=abs_gap
    )


def metrics(items: list[ForwardResult]) -> dict[str, float | None]:
    return batch_metrics(items, success_reward=1.0, policy_temperature=1.0)


def test_the_gap_is_measured_where_the_sampler_drew_from_the_policy_itself() -> None:
    items = [scored(0, 0.0, abs_gap=0.4)]
    assert metrics(items)["logprob_gap_on_policy"] == pytest.approx(0.1)
    task = items[0].rollout.task
    found = batch_metrics(items, success_reward=1.0, policy_temperature=1.0, tasks_with_minimum=[task])
    assert found["logprob_gap_on_policy"] is None  # there it could not sample end of sequence at first


@pytest.mark.parametrize(
    ("age", "name"),
    [(0, "0"), (1, "1_2"), (2, "1_2"), (3, "3_4"), (4, "3_4"), (5, "5_8"), (8, "5_8"), (9, "9_16"), (16, "9_16"),
     (17, "17_32"), (32, "17_32"), (33, "33_up"), (10**9, "33_up")],
)  # fmt: skip
def test_buckets_of_policy_ages(age: int, name: str) -> None:
    assert bucket_name(age) == name
    assert len({bucket_name(first) for first, _ in AGE_BUCKETS}) == 7


def test_each_bucket_is_measured_by_itself_and_only_those_that_occur_are_there() -> None:
    young = [scored(0, 0.0, abs_gap=0.4), scored(0, 0.0, abs_gap=0.4)]
    old = [scored(40, math.log(3.0), abs_gap=2.0), scored(99, 0.0, num_tokens=6, abs_gap=3.0)]
    found = metrics(young + old)
    assert found["ess_age_0"] == pytest.approx(1.0)
    assert found["ess_age_33_up"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert found["log_ratio_mean_age_33_up"] == pytest.approx(math.log(3.0) / 2)
    assert found["log_ratio_token_abs_age_0"] == pytest.approx(0.8 / 8)
    assert found["log_ratio_token_abs_age_33_up"] == pytest.approx(5.0 / 10)
    assert (found["num_rollouts_age_0"], found["num_rollouts_age_33_up"]) == (2.0, 2.0)
    assert {name for name in found if "_age_" in name and name.startswith("ess")} == {"ess_age_0", "ess_age_33_up"}
    assert found["log_ratio_token_mean"] == pytest.approx(math.log(3.0) / 18)


def test_one_bucket_that_holds_all_says_what_the_whole_batch_says() -> None:
    found = metrics([scored(7, ratio) for ratio in (0.1, -0.5, 2.0)])
    assert found["ess_age_5_8"] == found["ess"]
    assert found["log_ratio_mean_age_5_8"] == found["log_ratio_mean"]


def test_what_is_not_finite_is_unknown_and_never_a_number() -> None:
    found = metrics([scored(0, math.nan, abs_gap=math.nan), scored(1, math.inf, abs_gap=math.inf), scored(2, 0.0)])
    for name in ("ess", "ess_age_0", "log_ratio_mean", "log_ratio_token_mean", "kl_to_ref", "logprob_gap_on_policy"):
        assert found[name] is None
    assert all(value is None or math.isfinite(value) for value in found.values())
    assert ess_ratio(np.array([0.0, -math.inf])) is None


def test_without_a_reference_the_kl_to_it_is_unknown() -> None:
    item = scored(0, 0.0)
    without = ForwardResult(rollout=item.rollout, policy_age=0, logprob=-1.0, ref_logprob=None, abs_gap=0.0)
    assert metrics([without, without])["kl_to_ref"] is None
    assert metrics([item])["kl_to_ref"] == pytest.approx(5.0)
