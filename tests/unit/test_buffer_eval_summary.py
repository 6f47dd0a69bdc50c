"""Evaluation numbers: unknown scores are left out and counted, never taken for zero."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from tba_buffer.prompts.evaluation_summary import EvaluationUnit, count_unknown, summarise, summarise_first

from tba.evaluation.statistics import pass_at_k


def unit_results(**changes: Any) -> dict[str, Any]:
    return {"rewards": [1.0, 0.0], "num_response_tokens": [2, 4], **changes}


def test_accuracy_is_the_mean_over_prompts_of_the_share_of_known_successes() -> None:
    results = {
        EvaluationUnit("e", "sample", 0): {"rewards": [1.0, 0.0], "num_response_tokens": [2, 4]},
        EvaluationUnit("e", "sample", 1): {"rewards": [None, 1.5], "num_response_tokens": [6, 8]},
        EvaluationUnit("e", "sample", 2): {"rewards": [None, None], "num_response_tokens": [1, 1]},
        EvaluationUnit("e", "greedy", 0): {"rewards": [0.0], "num_response_tokens": [100]},
        EvaluationUnit("e", "greedy", 1): {"rewards": [None], "num_response_tokens": [100]},
        EvaluationUnit("e", "greedy", 2): {"rewards": [1.0], "num_response_tokens": [100]},
    }
    summary = summarise(results, success_reward=1.0)
    assert summary.accuracy == 0.75
    assert summary.greedy_accuracy == 0.5
    assert summary.mean_reward == 2.5 / 3
    assert summary.mean_response_tokens == 22 / 6
    assert summary.num_unknown == 4
    first = summarise_first(results, 1, success_reward=1.0)
    assert (first.accuracy, first.greedy_accuracy, first.num_unknown) == (0.5, 0.0, 0)
    assert count_unknown(results, 3) == {"sample": 3, "greedy": 1}
    assert count_unknown(results, 2) == {"sample": 1, "greedy": 1}


def test_nothing_known_gives_no_number() -> None:
    results = {EvaluationUnit("e", "sample", 0): unit_results(rewards=[None, None])}
    summary = summarise(results, success_reward=1.0, pass_at=[1, 2])
    assert summary.accuracy is None
    assert summary.mean_reward is None
    assert summary.pass_at == {1: None, 2: None}
    assert (summary.kl_to_reference, summary.distinct_1, summary.embedding_distance) == (None, None, None)
    assert summary.num_unknown == 2


@pytest.mark.parametrize(("num_samples", "num_successes"), [(5, 0), (5, 1), (5, 3), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_the_choices_of_k_samples_that_hold_a_success(
    num_samples: int, num_successes: int
) -> None:
    outcomes = [i < num_successes for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        choices = list(combinations(outcomes, k))
        assert pass_at_k(num_samples, num_successes, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_takes_only_prompts_of_which_k_scores_are_known() -> None:
    results = {
        EvaluationUnit("e", "sample", 0): unit_results(rewards=[1.0, 0.0, 0.0]),
        EvaluationUnit("e", "sample", 1): unit_results(rewards=[0.0, None, None]),
    }
    summary = summarise(results, success_reward=1.0, pass_at=[1, 2, 3])
    assert summary.pass_at[1] == summary.accuracy == pytest.approx((1 / 3 + 0) / 2)
    assert summary.pass_at[2] == pytest.approx(2 / 3)
    assert summary.pass_at[3] == 1.0


def test_kl_is_the_mean_over_samples_and_diversity_the_mean_over_prompts_of_the_samples_alone() -> None:
    results = {
        EvaluationUnit("e", "sample", 0): unit_results(log_ratios=[1.0, -0.5], distinct_1=0.5, distinct_3=None),
        EvaluationUnit("e", "sample", 1): unit_results(log_ratios=[None, 4.0], distinct_1=0.25, embedding_distance=0.1),
        EvaluationUnit("e", "greedy", 0): unit_results(rewards=[1.0], log_ratios=[100.0], distinct_1=1.0),
    }
    summary = summarise(results, success_reward=1.0)
    assert summary.kl_to_reference == 1.5
    assert (summary.distinct_1, summary.distinct_2, summary.distinct_3) == (0.375, None, None)
    assert summary.embedding_distance == 0.1
