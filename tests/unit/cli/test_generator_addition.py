"""The quickstart's task: what is asked, what is right, and that evaluation asks nothing that was ever seen."""

import random

import pytest

from tba.errors import ConfigError
from tba_cli.generators import load_prompt_source
from tba_cli.generators.addition import SPLITS, Problem, all_problems, generate, noisy_answer, split_of, stream


def test_the_answer_is_the_sum_backwards():
    assert Problem(left=47, right=85).answer == "231"
    assert Problem(left=52, right=58).answer == "011"


def test_no_sum_and_no_mirror_image_is_in_two_splits():
    seen: dict[tuple[int, int], str] = {}
    for split in SPLITS:
        for problem in all_problems(split):
            low, high = sorted((problem.left, problem.right))
            assert seen.setdefault((low, high), split) == split
    assert sum(len(all_problems(split)) for split in SPLITS) == 90 * 90


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_prompts_are_in_no_other_split_and_the_same_for_every_seed(seed: int):
    prompts = generate(500, 512, seed)
    heldout = [p for p in prompts if p.split == "heldout"]
    assert len(heldout) == 512
    assert heldout == [p for p in generate(1, 512, 99) if p.split == "heldout"]
    for prompt in prompts:
        _, left, right = prompt.prompt_id.split("-")
        assert split_of(int(left), int(right)) == prompt.split


def test_training_prompts_depend_on_the_seed_and_on_nothing_else():
    assert generate(50, 1, 3) == generate(50, 1, 3)
    assert generate(50, 1, 3) != generate(50, 1, 4)


def test_the_warm_start_sees_only_its_own_split():
    problems = stream("warmstart", 0)
    assert {split_of(p.left, p.right) for p in (next(problems) for _ in range(5000))} == {"warmstart"}


def test_a_careful_pupil_is_right_and_a_careless_one_forgets_carries():
    rng = random.Random(0)
    for problem in all_problems("validation"):
        assert noisy_answer(problem, rng, drop_carry=0, wrong_digit=0) == problem.answer
    assert noisy_answer(Problem(left=47, right=85), rng, drop_carry=1, wrong_digit=0) == "22"


def test_more_prompts_than_there_are_is_one_sentence():
    with pytest.raises(ConfigError, match=r"data.num_heldout is 5000, but task 'addition' has 786 heldout prompts"):
        generate(10, 5000, 0)


def test_an_unknown_generator_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"^data.generator 'adition' is not known \(known are addition\)"):
        load_prompt_source("adition")
