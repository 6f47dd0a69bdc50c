"""The task whose long tail stays: what is right, how long responses are, and that its splits are apart."""

import random
from itertools import islice
from pathlib import Path

from tba_reward.scorer import Item
from tba_reward.scorers.last_number import score

from examples.worlds.tally import problems as tally
from examples.worlds.tally.problems import (
    MAX_TERMS,
    MIN_TERMS,
    SPLITS,
    Problem,
    distinct,
    generate,
    noisy_response,
    stream,
)
from tba.config import load_recipe
from tba.config.reward import LastNumberSpec

ROOT = Path(__file__).resolve().parents[3]
PARAMS = LastNumberSpec(kind="last_number").model_dump()


def reward(problem: Problem, response: str) -> float:
    outcome = score(Item(prompt=problem.text, response=response, data={"answer": problem.answer}), PARAMS)
    assert isinstance(outcome, float)
    return outcome


def test_a_right_response_writes_every_total():
    problem = Problem((7, 5, 8, 9))
    assert (problem.text, problem.response, problem.answer) == ("a7b5c8d9=", "a7b5=2c8=0d9=9", "9")
    assert reward(problem, problem.response) == 1.0
    assert len(Problem((1,) * MAX_TERMS).response) + 1 == tally.MAX_RESPONSE_TOKENS


def test_the_number_of_terms_has_the_tail_of_paretos_law():
    problems = list(islice(stream("train", 0), 20_000))
    nums = [len(problem.terms) for problem in problems]
    assert (min(nums), max(nums)) == (MIN_TERMS, MAX_TERMS)
    for least in (5, 8, 16, 31):
        share = sum(num >= least for num in nums) / len(nums)
        # far outside of the noise; a split has a share of the multisets of few terms, and not exactly its buckets'
        assert abs(share / (MIN_TERMS / least) ** tally.TAIL_EXPONENT - 1) < 0.15, least


def test_careless_responses_are_wrong_and_carry_the_error_on():
    rng, problems = random.Random(0), distinct("validation", 500, 0)
    assert all(reward(p, noisy_response(p, rng, wrong_digit=0)) == 1.0 for p in problems)
    right = [reward(p, noisy_response(p, rng, wrong_digit=0.1)) for p in problems]
    by_length = [[r for p, r in zip(problems, right, strict=True) if (len(p.terms) > 8) == long] for long in (0, 1)]
    short, long = (sum(each) / len(each) for each in by_length)
    assert short > 0.6
    assert long < 0.4


def test_no_order_of_the_same_terms_is_in_two_splits():
    seen: dict[tuple[int, ...], str] = {}
    for split in SPLITS:
        for problem in islice(stream(split, 0), 3000):
            assert seen.setdefault(tuple(sorted(problem.terms)), split) == split


def test_prompts_are_those_of_the_recipe_and_held_out_ones_are_the_same_for_every_seed():
    recipe = load_recipe(ROOT / "examples/worlds/tally/tally.toml")
    prompts = generate(recipe.data.num_train, recipe.data.num_heldout, 0)
    heldout = [prompt for prompt in prompts if prompt.split == "heldout"]
    assert len(heldout) == recipe.data.num_heldout
    assert heldout == [p for p in generate(1, recipe.data.num_heldout, 7) if p.split == "heldout"]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert {prompt.task for prompt in prompts} <= recipe.reward.tasks.keys()
    assert recipe.searcher.max_response_tokens >= tally.MAX_RESPONSE_TOKENS
    assert recipe.searcher.max_prompt_tokens >= max(len(prompt.text) for prompt in prompts)
