"""Numbers of an evaluation: means and errors against brute force, unknown never taken for anything, and the tables."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tba.config.evaluation import PublishedNumber
from tba.evaluation.evaluation_job import Comparison, Estimate, EvaluationReport, ModeReport, ScoreCounts
from tba.evaluation.statistics import exp_of_ratio, mean_of_pairs, mean_of_prompts, success_rate
from tba_cli.reports.comparison import evaluation_markdown


def test_a_mean_counts_prompts_as_independent_and_completions_of_one_prompt_not() -> None:
    values = [[1.0, 0.0], [1.0, 1.0, 1.0], [], [0.0]]
    found = mean_of_prompts(values)
    assert found.value == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.stderr == pytest.approx(np.std([0.5, 1, 0], ddof=1) / math.sqrt(3))
    assert (found.num_prompts, found.num_completions) == (3, 6)


def test_with_a_single_prompt_its_completions_count_as_independent() -> None:
    samples = [1.0, 0.0, 0.0, 1.0, 1.0]
    found = mean_of_prompts([samples, []])
    assert found.value == pytest.approx(0.6)
    assert found.stderr == pytest.approx(np.std(samples, ddof=1) / math.sqrt(5))
    assert mean_of_prompts([[2.0]]).stderr is None
    assert mean_of_prompts([[], []]).value is None


def test_the_standard_error_is_the_spread_of_the_mean_over_repetitions() -> None:
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        difficulty = rng.normal(size=50)  # shared by the 4 completions of a prompt
        found = mean_of_prompts((difficulty[:, None] + rng.normal(size=(50, 4))).tolist())
        means.append(found.value)
        errors.append(found.stderr)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)
    naive = math.sqrt(2 / 200)  # as if all 200 completions were independent
    assert np.std(means) > 1.4 * naive


def test_unknown_scores_are_left_out_of_a_success_rate_and_bound_it() -> None:
    found = success_rate([[True, None], [False, False], [None, None]])
    assert found.value == pytest.approx((1 + 0) / 2)
    assert found.low == pytest.approx((0.5 + 0 + 0) / 3)
    assert found.high == pytest.approx((1 + 0 + 1) / 3)
    assert (found.num_prompts, found.num_completions) == (2, 3)
    known = success_rate([[True], [False]])
    assert (known.low, known.high) == (None, None)


def test_a_perplexity_is_that_of_all_tokens_together() -> None:
    nlls, lengths = [[3.0, 1.0], [8.0]], [[2.0, 2.0], [4.0]]
    found = exp_of_ratio(nlls, lengths)
    assert found.value == pytest.approx(math.exp(12 / 8))
    rng = np.random.default_rng(1)
    values, errors = [], []
    for _ in range(400):
        size = rng.integers(5, 20, (60, 1)).astype(float)
        sample = exp_of_ratio((size * rng.gamma(4.0, 0.5, (60, 1))).tolist(), size.tolist())
        values.append(sample.value)
        errors.append(sample.stderr)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)
    assert exp_of_ratio([[]], [[]]).value is None
    assert exp_of_ratio([[1e6]], [[1.0]]).value is None  # it is infinite: JSON has no word for that


def test_the_mean_of_pairs_and_its_jackknife() -> None:
    rng = np.random.default_rng(2)
    points = rng.normal(size=(9, 3))
    distances = np.linalg.norm(points[:, None] - points, axis=2)

    def mean_of(chosen: list[int]) -> float:
        return float(np.mean([distances[i, j] for i, j in combinations(chosen, 2)]))

    value, stderr = mean_of_pairs(distances)
    assert value == pytest.approx(mean_of(list(range(9))))
    without = np.array([mean_of([i for i in range(9) if i != left_out]) for left_out in range(9)])
    assert stderr == pytest.approx(math.sqrt(8 / 9 * ((without - without.mean()) ** 2).sum()))
    assert mean_of_pairs(distances[:1, :1]) == (None, None)
    assert mean_of_pairs(distances[:2, :2]) == (pytest.approx(distances[0, 1]), None)


def test_the_tables_show_errors_unknown_scores_and_the_difference_to_published_numbers() -> None:
    found = Estimate(value=0.5, stderr=0.125, num_prompts=16, num_completions=16, low=0.4, high=0.6)
    unknown = {"timeout": 3, "crashed": 1}
    counts = ScoreCounts(reward_versions=["t@1"], success=">= 1", num_scored=16, num_unknown=4, unknown=unknown)
    greedy = ModeReport(temperature=0, num_completions=19, finish_reasons={"stop": 19}, scores={"t": counts})
    one = PublishedNumber(name="a paper", metric="greedy.t.success_rate", value=0.25, setting="7 steps", source="p. 3")
    other = PublishedNumber(name="another", metric="greedy.t.mean_reward", value=1.0, setting="8 steps", source="p. 4")
    references = [Comparison(reference=one, found=found), Comparison(reference=other, found=None)]
    about: dict[str, Any] = {"subject": "version 1-4 of run 'demo'", "version": "1-4", "params_sha256": None}
    about |= {"run": "demo", "engine": "embedded", "tba_version": "0", "finished_at_s": 1.0, "num_prompts": 20}
    about |= {"refused_prompts": {"p-7": "too long"}, "generation_s": 2.0, "num_generated_tokens": 100, "settings": {}}
    metrics = {"greedy.t.success_rate": found}
    report = EvaluationReport(**about, modes={"greedy": greedy}, metrics=metrics, references=references)
    table = evaluation_markdown(report)
    squeezed = " ".join(table.split())
    assert "| greedy.t.success_rate (>= 1) | 0.5 (0.4 to 0.6) | 0.125 | 16 | 16 |" in squeezed
    assert "greedy t: 4 of 20 scores are unknown (1 crashed, 3 timeout)" in table
    assert "1 prompts were refused, for example p-7: too long" in table
    differs = "0.25 | 0.5 ± 0.125 | +0.25 (+2.0 standard errors)"
    assert f"| a paper | greedy.t.success_rate | {differs} | 7 steps | p. 3 |" in squeezed
    assert "| another | greedy.t.mean_reward | 1 | unknown | |" in squeezed
