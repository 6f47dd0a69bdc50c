"""Prompts from code: the quickstart's sums, and functions that are not ours."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba_cli.generators import load_prompt_source
from tba_cli.generators.addition import SPLITS, Problem, all_problems, generate, noisy_answer, split_of, stream
from tba_cli.prompts.reader import prompts_of
from tests.support.buffer import make_recipe


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


MODULE = """
from tba.api import Prompt

def squares(num_train, num_heldout, seed):
    splits = ["train"] * num_train + ["heldout"] * num_heldout
    return [
        Prompt(prompt_id=f"square-{n}", task="exact", text=f"{n}*{n}=", data={"answer": str(n * n)}, split=split)
        for n, split in enumerate(splits, start=seed)
    ]

def twice(num_train, num_heldout, seed):
    return squares(1, 1, seed) * 2

def broken(num_train, num_heldout, seed):
    return 1 // 0

def words(num_train, num_heldout, seed):
    return ["not a prompt"]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_prompts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_prompts", raising=False)


def test_a_function_of_the_current_folder_makes_the_prompts() -> None:
    data = {"generator": "my_prompts:squares", "num_train": 2, "num_heldout": 1}
    found = [(prompt.text, prompt.split) for prompt in prompts_of(make_recipe(data=data))]
    assert found == [("0*0=", "train"), ("1*1=", "train"), ("2*2=", "heldout")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sqares", "is not known .known are addition., and no import path; write MODULE:NAME"),
        ("my_prompts:broken", "failed .ZeroDivisionError"),
        ("my_prompts:words", "must be a tba.api.Prompt"),
        ("my_prompts:twice", "made the prompt_id 'square-0' twice"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"data.generator '{name}' {says}|{says}"):
        load_prompt_source(name)(1, 1, 0)
