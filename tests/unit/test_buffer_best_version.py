"""The best version: compared on the same prompts only, of equal ones the first, and read off what is stored."""

from __future__ import annotations

from typing import Any

import pytest
from tba_buffer.prompts.evaluation_summary import find_best_version

from tba.config.evaluation import EvalSection

SECTION = EvalSection(num_prompts=4, num_prompts_final=16)


def document(version: str, accuracy: float | None, *, num_prompts: int = 4, at_s: float = 1.0, **changes: Any) -> dict:
    return {
        "eval_id": f"eval-{version}",
        "version": version,
        "state": "done",
        "num_prompts": num_prompts,
        "num_samples": 1,
        "success_reward": 1.0,
        "summary": {"accuracy": accuracy, "finished_at_s": at_s},
        **changes,
    }


def best(*documents: dict, section: EvalSection = SECTION, num_heldout: int = 100) -> tuple[str, float] | None:
    found = find_best_version(documents, section, num_heldout=num_heldout)
    return None if found is None else (found.version, found.value)


def test_the_highest_value_wins_and_a_tie_keeps_the_one_that_finished_first() -> None:
    early, late = document("1-8", 0.5, at_s=2.0), document("1-4", 0.5, at_s=3.0)
    assert best(document("0-0", 0.25), late, early) == ("1-8", 0.5)
    assert best(early, document("1-12", 0.75, at_s=9.0)) == ("1-12", 0.75)
    found = find_best_version([early], SECTION, num_heldout=100)
    assert found is not None
    assert (found.metric, found.num_prompts, found.num_samples) == ("accuracy", 4, 1)


def test_nothing_finished_or_nothing_known_is_no_best_version() -> None:
    assert best() is None
    assert best(document("0-0", None)) is None
    assert best(document("0-0", 1.0, state="pending")) is None


def test_only_evaluations_of_the_same_kind_are_compared() -> None:
    plain = document("1-4", 0.2)
    assert best(plain, document("1-8", 0.9, num_samples=2)) == ("1-4", 0.2)
    assert best(plain, document("1-8", 0.9, success_reward=0.5)) == ("1-4", 0.2)
    assert best(plain, document("1-8", 0.9, num_prompts=16)) == ("1-4", 0.2)


def test_an_evaluation_on_more_prompts_counts_with_its_numbers_on_the_first_ones() -> None:
    larger = document("1-8", 0.1, num_prompts=16, first={"num_prompts": 4, "numbers": {"accuracy": 0.9}})
    assert best(document("1-4", 0.2), larger) == ("1-8", 0.9)
    assert best(larger, section=EvalSection(num_prompts=8)) is None
    # fewer held-out prompts than the recipe wants: all evaluations are on all of them
    assert best(document("1-4", 0.2, num_prompts=3), num_heldout=3) == ("1-4", 0.2)


@pytest.mark.parametrize(
    ("metric", "expected"), [("greedy_accuracy", "1-4"), ("mean_reward", "1-8"), ("pass@2", "1-12")]
)
def test_the_metric_is_the_recipes(metric: str, expected: str) -> None:
    section = EvalSection(num_prompts=4, num_samples=2, pass_at=[2], best_metric=metric)
    documents = [
        document("1-4", 0.0, num_samples=2, summary={"greedy_accuracy": 0.5, "finished_at_s": 1.0}),
        document("1-8", 0.0, num_samples=2, summary={"mean_reward": 0.5, "finished_at_s": 2.0}),
        document("1-12", 0.0, num_samples=2, summary={"pass_at": {"2": 0.5}, "finished_at_s": 3.0}),
    ]
    assert best(*documents, section=section) == (expected, 0.5)


def of_unknown(metric: str, **unknown: int) -> tuple[str, float] | None:
    """The best of one with everything known and value 0.5, and one with value 1 and so many unknown scores, of 200
    prompts with 2 samples."""
    section = EvalSection(num_prompts=200, num_samples=2, pass_at=[2], best_metric=metric)
    values = [{"accuracy": v, "greedy_accuracy": v, "pass_at": {"2": v}, "mean_reward": v} for v in (0.5, 1.0)]
    total = sum(unknown.values())
    documents = [
        document("1-4", 0.0, num_prompts=200, num_samples=2, summary={**values[0], "finished_at_s": 1.0}),
        document(
            "1-8",
            0.0,
            num_prompts=200,
            num_samples=2,
            summary={**values[1], "finished_at_s": 2.0, "num_unknown": total},
            first={
                "num_prompts": 200,
                "numbers": {**values[1], "num_unknown": total},
                "num_unknown": {"sample": 0, "greedy": 0, **unknown},
            },
        ),
    ]
    return best(*documents, section=section, num_heldout=200)


@pytest.mark.parametrize(
    ("metric", "most"), [("accuracy", 4), ("mean_reward", 4), ("pass@2", 2), ("greedy_accuracy", 2)]
)
def test_an_evaluation_of_which_too_much_is_unknown_is_not_compared(metric: str, most: int) -> None:
    kind, other = ("greedy", "sample") if metric == "greedy_accuracy" else ("sample", "greedy")
    assert of_unknown(metric, **{kind: most, other: 100}) == ("1-8", 1.0)
    assert of_unknown(metric, **{kind: most + 1}) == ("1-4", 0.5)
    assert of_unknown(metric, **{kind: 399}) == ("1-4", 0.5)


def test_an_evaluation_of_an_older_release_is_not_compared_where_any_scores_are_unknown() -> None:
    old = {"accuracy": 0.9, "finished_at_s": 1.0}
    assert best(document("1-4", 0.2), document("1-8", 0.9, summary={**old, "num_unknown": 1})) == ("1-4", 0.2)
    assert best(document("1-4", 0.2), document("1-8", 0.9, summary={**old, "num_unknown": 0})) == ("1-8", 0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 4, "pass_at": [8]}, "raise num_samples"),
        ({"best_metric": "pass@2"}, "no pass@K"),
        ({"best_metric": "loss"}, "none of accuracy"),
        ({"embedding_model": "encoder"}, "raise num_samples"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalSection.model_validate(changes)
