"""Evaluation numbers: unknown scores are left out and counted, never taken for zero."""

from __future__ import annotations

from tba_buffer.evals import Unit, summarise


def test_accuracy_is_the_mean_over_prompts_of_the_share_of_known_successes() -> None:
    results = {
        Unit("e", "sample", 0): {"rewards": [1.0, 0.0], "num_response_tokens": [2, 4]},
        Unit("e", "sample", 1): {"rewards": [None, 1.5], "num_response_tokens": [6, 8]},
        Unit("e", "sample", 2): {"rewards": [None, None], "num_response_tokens": [1, 1]},
        Unit("e", "greedy", 0): {"rewards": [0.0], "num_response_tokens": [100]},
        Unit("e", "greedy", 1): {"rewards": [None], "num_response_tokens": [100]},
        Unit("e", "greedy", 2): {"rewards": [1.0], "num_response_tokens": [100]},
    }
    summary = summarise(results, success_reward=1.0)
    assert summary["accuracy"] == 0.75
    assert summary["greedy_accuracy"] == 0.5
    assert summary["mean_reward"] == 2.5 / 3
    assert summary["mean_response_tokens"] == 22 / 6
    assert summary["num_unknown"] == 4


def test_nothing_known_gives_no_number() -> None:
    summary = summarise({Unit("e", "sample", 0): {"rewards": [None], "num_response_tokens": [3]}}, success_reward=1.0)
    assert summary["accuracy"] is None
    assert summary["mean_reward"] is None
    assert summary["num_unknown"] == 1
