"""What sampled answers say: numbers of each task, and the one thing that keeps a run from learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tba.config import Recipe
from tba_cli.reports.sample import SampledAnswer, answer_text, best_and_worst, task_samples
from tests.support.trainer_values import make_recipe


def group(name: str, rewards: Sequence[float | None], *, cut: int = 0, task: str = "sums") -> list[SampledAnswer]:
    """Return answers to one prompt; the first `cut` of them are cut."""
    return [
        SampledAnswer(
            task=task,
            prompt_id=name,
            prompt_text="1+1=",
            num_response_tokens=8 if number < cut else 4,
            response_text=f"\x1b[2J{reward}\nend",
            finish_reason="length" if number < cut else "stop",
            reward=reward,
            reward_reason="timeout" if reward is None else None,
        )
        for number, reward in enumerate(rewards)
    ]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path, searcher={"max_response_tokens": 8})


def test_groups_cuts_and_unknown_rewards_are_counted_for_each_task(recipe: Recipe) -> None:
    groups = [group("a", (0, 1, 1, None), cut=1), group("b", (0, 0, 0, 0)), group("c", (1, None, None, None), cut=2)]
    sums, words = task_samples([*groups, group("a", (0.5, 0.5), task="words"), group("a", (1, 1), task="words")])
    assert (sums.num_prompts, sums.num_answers, sums.num_cut, sums.unknown) == (3, 12, 3, {"timeout": 4})
    # one known reward is compared with nothing
    assert (sums.num_groups, sums.num_equal, sums.reward_range) == (2, 1, (0, 1))
    assert (sums.mean_response_tokens, sums.mean_reward.value) == (5, pytest.approx((2 / 3 + 0 + 1) / 3))
    assert sums.advice(recipe) is None
    # two slots of a batch may draw one prompt
    assert (words.num_prompts, words.num_groups, words.num_equal, words.unknown) == (1, 2, 2, {})
    assert sums.line(recipe) == (
        "12 answers to 3 prompts of task 'sums', mean reward 0.556 ± 0.29, 1 of 2 groups without a difference, "
        "3 of 12 cut at 8 tokens, 5 tokens on average, 4 unknown rewards (timeout)"
    )


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([group("a", (0, 0), cut=2), group("b", (0, 0), cut=1)], "3 of 4 answers are cut at "),
        ([group("a", (0, 0)), group("b", (0, 0), cut=2)], "in all 2 groups the answers have the same reward (0)"),
        ([group("a", (0, 0)), group("b", (0.5, 0.5))], "the same reward (0 to 0.5)"),
        ([group("a", (1, 1)), group("b", (1, 1))], "all 4 answers succeed (reward 1)"),
        ([group("a", (None, None), cut=2)], "no answer has a reward: timeout"),
        ([group("a", (0, 0)), group("b", (0, 1))], None),
        ([group("a", (0,)), group("b", (0,))], None),
    ],
    ids=["cut", "never", "no difference", "solved", "unknown", "good", "no groups"],
)
def test_the_first_thing_that_keeps_a_run_from_learning_is_said(recipe, groups, said: str | None) -> None:
    (found,) = task_samples(groups)
    advice = found.advice(recipe)
    assert (advice is None) == (said is None)
    assert advice is None or (said or "") in advice[0]


def test_the_best_and_the_worst_answer_are_shown_whole_and_cannot_steer_a_terminal() -> None:
    shown = best_and_worst([group("a", (0.5, None)), group("b", (-1, 0))])
    assert {name: answer.reward for name, answer in shown.items()} == {"best": 0.5, "worst": -1}
    assert answer_text("worst", shown["worst"]).splitlines() == [
        *("worst answer: reward -1, 4 tokens, stop", "  prompt b:", "    | 1+1=", "  answer:"),
        *(r"    | \x1b[2J-1", "    | end"),
    ]
    assert best_and_worst([group("a", (None,))])["best"].reward_reason == "timeout"
