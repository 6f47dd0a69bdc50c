"""Numbers of evaluations, and the best version by them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError
from tba_buffer.prompts.evaluation_summary import (
    EvaluationUnit,
    StoredEval,
    count_unknown,
    find_best_version,
    summarise,
    summarise_first,
    with_raised,
)

from tba.api import EvalResult
from tba.config.evaluation import EvalSection
from tba.evaluation.statistics import pass_at_k


def unit_results(**changes: Any) -> EvalResult:
    return EvalResult(**{"lease_id": "any", "rewards": [1.0, 0.0], "num_response_tokens": [2, 4], **changes})


def test_accuracy_is_the_mean_over_prompts_of_the_share_of_known_successes() -> None:
    results = {
        EvaluationUnit("e", "sample", 0): unit_results(rewards=[1.0, 0.0], num_response_tokens=[2, 4]),
        EvaluationUnit("e", "sample", 1): unit_results(rewards=[None, 1.5], num_response_tokens=[6, 8]),
        EvaluationUnit("e", "sample", 2): unit_results(rewards=[None, None], num_response_tokens=[1, 1]),
        EvaluationUnit("e", "greedy", 0): unit_results(rewards=[0.0], num_response_tokens=[100]),
        EvaluationUnit("e", "greedy", 1): unit_results(rewards=[None], num_response_tokens=[100]),
        EvaluationUnit("e", "greedy", 2): unit_results(rewards=[1.0], num_response_tokens=[100]),
    }
    summary = summarise(results, success_reward=1.0)
    assert (summary.accuracy, summary.greedy_accuracy) == (0.75, 0.5)
    assert (summary.mean_reward, summary.mean_response_tokens, summary.num_unknown) == (2.5 / 3, 22 / 6, 4)
    first = summarise_first(results, 1, success_reward=1.0)
    assert (first.numbers.accuracy, first.numbers.greedy_accuracy, first.numbers.num_unknown) == (0.5, 0.0, 0)
    assert count_unknown(results) == {"sample": 3, "greedy": 1}
    assert summarise_first(results, 2, success_reward=1.0).num_unknown == {"sample": 1, "greedy": 1}


def test_an_answer_that_is_why_it_has_no_score_is_no_success_and_not_left_out() -> None:
    raised = {EvaluationUnit("e", "sample", n): unit_results(rewards=[float(n < 14)]) for n in range(31)}
    results = raised | {EvaluationUnit("e", "sample", 31): unit_results(rewards=[None], num_wrong=1)}
    summary = summarise(results, success_reward=1.0)
    assert (summary.accuracy, summary.num_unknown) == (14 / 32, 0)
    assert summary.mean_reward == 14 / 31, "no number is made up for it"
    assert count_unknown(results) == {"sample": 0, "greedy": 0}


def test_an_answer_that_a_scorer_raised_for_is_wrong_only_where_that_scorer_scores_others_of_its_task() -> None:
    results = {EvaluationUnit("e", "greedy", n): unit_results(rewards=[float(n < 14)]) for n in range(31)}
    results[EvaluationUnit("e", "greedy", 31)] = unit_results(rewards=[None], num_raised=1)
    results[EvaluationUnit("e", "sample", 32)] = unit_results(rewards=[None, None], num_raised=1, num_wrong=1)
    results[EvaluationUnit("e", "greedy", 33)] = unit_results(rewards=[None], num_raised=1)
    tasks = {number: "works" if number < 32 else "broken" for number in range(34)}
    summary = summarise(with_raised(results, tasks), success_reward=1.0)
    assert (summary.greedy_accuracy, summary.accuracy, summary.num_unknown) == (14 / 32, 0.0, 2)
    assert count_unknown(with_raised(results, tasks)) == {"sample": 1, "greedy": 1}


def test_nothing_known_gives_no_number() -> None:
    results = {EvaluationUnit("e", "sample", 0): unit_results(rewards=[None, None])}
    summary = summarise(results, success_reward=1.0, pass_at=[1, 2])
    assert summary.accuracy is None
    assert summary.mean_reward is None
    assert (summary.pass_at, summary.distinct_1, summary.embedding_distance) == ({1: None, 2: None}, None, None)
    assert summary.num_unknown == 2


@pytest.mark.parametrize(("num_samples", "num_successes"), [(5, 0), (5, 1), (5, 3), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_success(num_samples: int, num_successes: int) -> None:
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
    assert (summary.pass_at[2], summary.pass_at[3]) == (pytest.approx(2 / 3), 1.0)


def test_diversity_is_the_mean_over_prompts_of_the_samples_alone() -> None:
    results = {
        EvaluationUnit("e", "sample", 0): unit_results(distinct_1=0.5, distinct_3=None),
        EvaluationUnit("e", "sample", 1): unit_results(distinct_1=0.25, embedding_distance=0.1),
        EvaluationUnit("e", "greedy", 0): unit_results(rewards=[1.0], distinct_1=1.0),
    }
    summary = summarise(results, success_reward=1.0)
    assert (summary.distinct_1, summary.distinct_2, summary.distinct_3) == (0.375, None, None)
    assert summary.embedding_distance == 0.1


SECTION = EvalSection(num_prompts=4, num_prompts_final=16)


def document(
    version: str, *, num_prompts: int = 4, unknown: dict[str, int] | None = None, changes: Any = None, **numbers: Any
) -> StoredEval:
    """A finished evaluation whose first `num_prompts` prompts have these numbers."""
    first = {"num_prompts": num_prompts, "numbers": numbers, "num_unknown": unknown or {}}
    fields = {"eval_id": f"eval-{version}", "version": version, "num_prompts": num_prompts, "first": first}
    usual = {"state": "done", "num_samples": 1, "success_reward": 1.0, "created_at_s": 1.0, "deadline_s": 2.0}
    return StoredEval.model_validate({**usual, **fields, **(changes or {})})


def best(*documents: StoredEval, section: EvalSection = SECTION, num_heldout: int = 100) -> tuple[str, float] | None:
    found = find_best_version(documents, section, num_heldout=num_heldout)
    return None if found is None else (found.version, found.value)


def test_the_highest_value_wins_and_of_equal_ones_the_newest_version() -> None:
    newer, older = document("1-12", accuracy=0.5), document("1-8", accuracy=0.5)
    for documents in ([older, newer], [newer, older]):
        assert best(document("0-0", accuracy=0.25), *documents) == ("1-12", 0.5)
    assert best(newer, document("2-4", accuracy=0.5), document("2-16", accuracy=0.25)) == ("2-4", 0.5)
    assert best(newer, document("1-4", accuracy=0.75)) == ("1-4", 0.75)
    found = find_best_version([newer], SECTION, num_heldout=100)
    assert found is not None
    assert (found.metric, found.num_prompts, found.num_samples) == ("accuracy", 4, 1)


def test_nothing_finished_or_nothing_known_is_no_best_version() -> None:
    assert best() is None
    assert best(document("0-0", accuracy=None)) is None
    assert best(document("0-0", changes={"state": "pending", "first": None})) is None


def test_only_evaluations_of_the_same_kind_are_compared() -> None:
    plain = document("1-4", accuracy=0.2)
    others: Any = ({"changes": {"num_samples": 2}}, {"changes": {"success_reward": 0.5}}, {"num_prompts": 3})
    for other in others:
        assert best(plain, document("1-8", accuracy=0.9, **other)) == ("1-4", 0.2)
    # of an evaluation on more prompts, the first ones count
    assert best(plain, document("1-8", accuracy=0.9, changes={"num_prompts": 16})) == ("1-8", 0.9)
    assert best(plain, section=EvalSection(num_prompts=8)) is None
    # fewer held-out prompts than the recipe wants: all evaluations are on all of them
    assert best(document("1-4", accuracy=0.2, num_prompts=3), num_heldout=3) == ("1-4", 0.2)


@pytest.mark.parametrize(
    ("metric", "expected"), [("greedy_accuracy", "1-4"), ("mean_reward", "1-8"), ("pass@2", "1-12")]
)
def test_the_metric_is_the_recipes(metric: str, expected: str) -> None:
    section = EvalSection(num_prompts=4, num_samples=2, pass_at=[2], best_metric=metric)
    values: Any = {"1-4": {"greedy_accuracy": 0.5}, "1-8": {"mean_reward": 0.5}, "1-12": {"pass_at": {"2": 0.5}}}
    documents = [document(version, changes={"num_samples": 2}, **numbers) for version, numbers in values.items()]
    assert best(*documents, section=section) == (expected, 0.5)


@pytest.mark.parametrize(
    ("metric", "most"), [("accuracy", 4), ("mean_reward", 4), ("pass@2", 2), ("greedy_accuracy", 2)]
)
def test_an_evaluation_of_which_too_much_is_unknown_is_not_compared(metric: str, most: int) -> None:
    section = EvalSection(num_prompts=200, num_samples=2, pass_at=[2], best_metric=metric)

    def best_beside(**unknown: int) -> tuple[str, float] | None:
        """The best of one with value 0.5, and one with value 1 and so many unknown scores, of 200 prompts."""
        documents = []
        for version, value, counts in (("1-4", 0.5, {}), ("1-8", 1.0, unknown)):
            values: Any = dict.fromkeys(["accuracy", "greedy_accuracy", "mean_reward"], value)
            fields: Any = {"num_prompts": 200, "unknown": counts, "changes": {"num_samples": 2}}
            documents.append(document(version, **fields, **values, pass_at={"2": value}))
        return best(*documents, section=section, num_heldout=200)

    kind, other = ("greedy", "sample") if metric == "greedy_accuracy" else ("sample", "greedy")
    assert best_beside(**{kind: most, other: 100}) == ("1-8", 1.0)
    assert best_beside(**{kind: most + 1}) == ("1-4", 0.5)
    assert best_beside(**{kind: 399}) == ("1-4", 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 4, "pass_at": [8]}, "raise num_samples"),
        ({"best_metric": "pass@2"}, "nor a pass@K"),
        ({"best_metric": "loss"}, "neither one of accuracy"),
        ({"embedding_model": "encoder"}, "raise num_samples"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalSection.model_validate(changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rewards", value) for value in ([1e308, 1e308], [-1e16, 1.0])),
        *(("num_response_tokens", value) for value in ([2**80, 1], [-1, 1])),
        *(("num_wrong", 10**10), ("num_raised", 10**10), ("distinct_1", 1e308), ("embedding_distance", -1e308)),
    ],
)
def test_a_result_with_a_huge_number_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        unit_results(**{field: value})
