"""The task with long-tailed responses: what is right, how long demonstrations are, and that its splits are apart."""

import random
from pathlib import Path

import pytest
from tba_reward.scorer import Item
from tba_reward.scorers.last_number import score

from examples.worlds.chain import problems as chain
from examples.worlds.chain.problems import SPLITS, Problem, all_problems, generate, noisy_response, split_of, stream
from tba.config import load_recipe
from tba.config.reward import LastNumberSpec
from tba.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PARAMS = LastNumberSpec(kind="last_number").model_dump()


def reward(problem: Problem, response: str) -> float:
    outcome = score(Item(prompt=problem.text, response=response, data={"answer": problem.answer}), PARAMS)
    assert isinstance(outcome, float)
    return outcome


def test_the_shortest_right_response_writes_every_total():
    problem = Problem((7, 5, 8, 9))
    assert (problem.text, problem.shortest, problem.answer) == ("7+5+8+9=", "7+5=12+8=20+9=29", "29")


def test_careful_responses_are_right_however_long_they_hesitate():
    rng, lengths = random.Random(0), []
    for problem in all_problems("validation"):
        response = noisy_response(problem, rng, drop_carry=0, wrong_digit=0)
        assert reward(problem, response) == 1.0
        assert response.startswith(problem.shortest)
        lengths.append(len(response) + 1)
    assert max(lengths) <= chain.MAX_RESPONSE_TOKENS
    # 60 % are as short as they can be; the mean and the tail come from the others
    assert 0.55 < sum(length <= 17 for length in lengths) / len(lengths) < 0.65
    assert 25 < sum(lengths) / len(lengths) < 40
    assert 0.01 < sum(length > 110 for length in lengths) / len(lengths) < 0.1


def test_careless_responses_are_wrong_and_carry_the_error_on():
    rng = random.Random(0)
    assert noisy_response(Problem((7, 5, 1, 1)), rng, drop_carry=1, wrong_digit=0).startswith("7+5=2+1=3+1=4")
    problems = all_problems("validation")
    right = sum(reward(p, noisy_response(p, rng, drop_carry=0.2, wrong_digit=0.08)) for p in problems)
    assert 0.3 < right / len(problems) < 0.6


def test_no_order_of_the_same_digits_is_in_two_splits():
    seen: dict[tuple[int, ...], str] = {}
    for split in SPLITS:
        for problem in all_problems(split):
            assert seen.setdefault(tuple(sorted(problem.terms)), split) == split
    assert sum(len(all_problems(split)) for split in SPLITS) == 9**4
    problems = stream("warmstart", 0)
    assert {split_of(next(problems).terms) for _ in range(3000)} == {"warmstart"}


def test_prompts_are_those_of_the_recipe_and_held_out_ones_are_the_same_for_every_seed():
    recipe = load_recipe(ROOT / "examples/worlds/chain/chain.toml")
    prompts = generate(recipe.data.num_train, recipe.data.num_heldout, 0)
    heldout = [prompt for prompt in prompts if prompt.split == "heldout"]
    assert heldout == [p for p in generate(1, recipe.data.num_heldout, 7) if p.split == "heldout"]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert {prompt.task for prompt in prompts} <= recipe.reward.tasks.keys()
    # +1: the end of sequence
    longest = chain.MAX_RESPONSE_TOKENS
    assert recipe.searcher.max_response_tokens == longest
    assert recipe.searcher.max_prompt_tokens >= max(len(prompt.text) for prompt in prompts)


def test_more_prompts_than_there_are_is_one_sentence():
    with pytest.raises(ConfigError, match=r"data.num_train is 9999, but task 'chain' has \d+ train prompts"):
        generate(9999, 1, 0)
