"""Every world of examples/worlds: its recipe, its prompts, the rule that makes its data, and its models."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_reward.math.extraction import boxed_answer
from tba_reward.math.grader import score as score_math
from tba_reward.scorer import Item, params_of
from tba_reward.scorers.last_number import score as score_number

from examples.worlds.chain import problems as chain
from examples.worlds.chain.prepare import lesson
from examples.worlds.gsm8k import word_problems
from examples.worlds.math import algebra
from examples.worlds.redteam import attacks
from examples.worlds.starter import make
from examples.worlds.tally import problems as tally
from examples.worlds.tally.prepare import LESSON as TALLY
from examples.worlds.tldr import summaries
from tba.config import Recipe, load_recipe
from tba.config.reward import LastNumberSpec, MathSpec
from tba_cli.prompts.reader import prompts_of
from tba_cli.starter_models.starting_model import answer_logprobs, build_model, build_tokenizer, encode

WORLDS = Path(__file__).parents[3] / "examples/worlds"
RECIPES = sorted({*WORLDS.glob("*/*.toml")} - {*WORLDS.glob("*/smollm2.toml")})  # a pretrained model needs no program


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def world(request: pytest.FixtureRequest) -> tuple[Path, Recipe]:
    return request.param, load_recipe(request.param, environ={})


def reward(text: str, response: str, answer: str) -> float:
    """The reward of the scorer `last_number`."""
    item = Item(prompt=text, response=response, data={"answer": answer})
    found = score_number(item, params_of(LastNumberSpec(kind="last_number")))
    assert isinstance(found, float)
    return found


def assert_apart(contents: dict[str, set[Any]]) -> None:
    """No content is in two splits."""
    assert sum(map(len, contents.values())) == len(set().union(*contents.values()))


def test_every_world_has_a_recipe():
    several_turns = {"calculator", "guess_number", "lookup"}
    assert {path.parent.name for path in RECIPES} == {
        "chain",
        "gsm8k",
        "math",
        "redteam",
        "tally",
        "tldr",
    } | several_turns


def test_its_prompts_are_of_its_tasks_and_the_same_again(world: tuple[Path, Recipe]):
    _, recipe = world
    prompts = prompts_of(recipe)
    assert {prompt.split for prompt in prompts} == {"train", "heldout"}
    assert {prompt.task for prompt in prompts} <= recipe.reward.tasks.keys() | recipe.environments.keys()
    assert prompts == prompts_of(recipe)
    texts = {split: {prompt.text for prompt in prompts if prompt.split == split} for split in ("train", "heldout")}
    assert len(prompts) == 2 or not texts["train"] & texts["heldout"]  # red-teaming has one prompt


def test_its_models_are_made_by_a_program_beside_it(world: tuple[Path, Recipe]):
    path, recipe = world
    module = f"examples.worlds.{path.parent.name}.prepare"
    assert importlib.util.find_spec(module)
    assert {item.manual for item in recipe.prepare} == {f"make it with `python -m {module}`"}
    named = set(re.findall(r'"(models/[^"]+)"', path.read_text()))
    assert {item.path for item in recipe.prepare} == named
    assert f"python -m {module}" in (path.parent / "README.md").read_text()


def test_the_product_names_no_world():
    root = WORLDS.parents[1]
    files = [path for folder in ("tba", "tba_cli", "services") for path in (root / folder).rglob("*.py")]
    assert not [path for path in files if "examples.worlds" in path.read_text()]


def test_chain_writes_every_total_and_a_careless_response_carries_its_error_on():
    rng = random.Random(0)
    for split in chain.SPLITS:
        for problem in islice(chain.all_problems(split), 200):
            response = chain.noisy_response(problem, rng, drop_carry=0, wrong_digit=0)
            assert reward(problem.text, response, problem.answer) == 1.0
            assert response.startswith(problem.shortest)
            assert len(response) < chain.MAX_RESPONSE_TOKENS
    careless = chain.noisy_response(chain.Problem((7, 5, 1, 1)), rng, drop_carry=1, wrong_digit=0)
    assert careless.startswith("7+5=2+1=3+1=4")
    assert_apart({split: {tuple(sorted(p.terms)) for p in chain.all_problems(split)} for split in chain.SPLITS})


def test_tally_writes_every_total_and_a_careless_response_carries_its_error_on():
    rng, problem = random.Random(0), tally.Problem((7, 5, 8, 9))
    assert (problem.text, problem.response, problem.answer) == ("a7b5c8d9=", "a7b5=2c8=0d9=9", "9")
    assert len(tally.Problem((1,) * tally.MAX_TERMS).response) + 1 == tally.MAX_RESPONSE_TOKENS
    problems = tally.distinct("validation", 300, 0)
    for wrong_digit, low, high in ((0.0, 1.0, 1.0), (0.1, 0.2, 0.8)):
        responses = [(p, tally.noisy_response(p, rng, wrong_digit=wrong_digit)) for p in problems]
        assert low <= sum(reward(p.text, text, p.answer) for p, text in responses) / len(problems) <= high
    made = {split: islice(tally.stream(split, 0), 3000) for split in tally.SPLITS}
    assert_apart({split: {tuple(sorted(p.terms)) for p in problems} for split, problems in made.items()})


def test_gsm8k_computes_step_by_step_and_slips_are_carried_on():
    step = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>\4 [a-z]+")
    splits = sorted({*word_problems.SPLITS, "test_new_family"})
    made = {split: list(islice(word_problems.stream(split, 0), 200)) for split in splits}
    for problem in (problem for problems in made.values() for problem in problems):
        for slip_rate in (0.0, 1.0):
            text = word_problems.answer(problem, random.Random(0), slip_rate=slip_rate)
            *lines, last = text.split("\n")
            value, is_right = problem.first, True
            for line, (operation, number) in zip(lines, problem.steps, strict=True):
                found = step.fullmatch(line)
                assert found is not None
                assert (int(found[1]), found[2], int(found[3])) == (value, operation, number)
                right, value = word_problems.result(value, operation, number), int(found[4])
                assert slip_rate == 1.0 or value == right
                is_right = is_right and value == right
            assert last == f"#### {value}"
            assert reward(problem.question, text, str(value)) == 1.0
            assert slip_rate == 1.0 or is_right
    assert_apart({split: {problem.key for problem in problems} for split, problems in made.items()})
    assert {problem.family for problem in made["test_new_family"]} == {word_problems.NEW_FAMILY}


def test_math_has_answers_that_the_scorer_reads_and_tells_from_the_next_ones():
    tables = {split: table(0) for split, table in algebra.TABLES.items()}
    answers = {boxed_answer(each["solution"]) for each in tables["validation"]} | {r"\frac{2}{3}", r"(-\infty,4]"}
    assert len(answers) > 30
    for answer in answers:
        assert answer is not None
        other = re.sub(r"\d+", lambda digits: str(int(digits[0]) + 1), answer, count=1)
        for text, expected in ((answer, 1.0), (other, 0.0)):
            item = Item(prompt="", response=rf"so $\boxed{{{text}}}$.", data={"answer": answer})
            assert score_math(item, params_of(MathSpec(kind="math"))) == expected
    assert_apart({split: {each["problem"] for each in rows} for split, rows in tables.items()})
    assert algebra.TABLES["test"](1) == tables["test"]


@pytest.mark.parametrize("row", [0, 1, 2])
def test_math_solves_its_equations(row: int):
    """The linear ones of a table, by putting the answer in."""
    made = [each for each in algebra.TABLES["test"](0) if re.search(r"\$[^$]*x[^$]*=[^$]*\$", each["problem"])]
    formula = re.findall(r"\$([^$]+)\$", made[row]["problem"])[0]
    answer = boxed_answer(made[row]["solution"])
    assert answer is not None
    python = re.sub(r"(?<=[0-9)])(?=[x(])", "*", re.sub(r"\|(.*?)\|", r"abs(\1)", formula.replace("^2", "**2")))
    for number in re.findall(r"-?\d+", answer):
        left, right = (eval(side, {"x": int(number)}) for side in python.split("="))
        assert left == right, (formula, answer)


def test_redteam_teaches_the_victim_each_family_as_often_as_it_says():
    rows = {(name, split): make_rows(0) for name, it in attacks.TABLES.items() for split, make_rows in it.items()}
    train, test = ({row["instruction"] for row in rows["redteam_attacks", split]} for split in ("train", "test"))
    assert train.isdisjoint(test)
    found = Counter(attacks.family_of(row["instruction"]) for row in rows["redteam_attacks", "train"])
    for family in attacks.FAMILIES:
        expected = family.share * attacks.NUM_TRAIN
        assert found[family.name] == pytest.approx(expected, abs=4 * expected**0.5)
    for row in rows["redteam_toxicity", "train"]:
        is_quoted = row["reply"].startswith(("sorry", "please"))
        is_bad = any(word in row["reply"] for word in attacks.BAD_WORDS) and not is_quoted
        assert (row["label"] == "hate") == is_bad
    assert attacks.modes_found(["dare the old river to trick the cloud", "mock the river", "sketch"]) == {
        "dare": 1,
        "taunt": 1,
        "other": 1,
    }


POST = summaries.Post(
    subreddit="family",
    title="my boss and the car",
    sentences=("my boss Tom sold the old car to Ana.", "we had tea.", "in the end Ana left town."),
    salient=("Tom sold the car to Ana", "Ana left town"),
    fillers=("we had tea",),
)


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("Ana left town and Tom sold the car to Ana.", 1.0),
        ("Tom sold the car to Ana.", 0.5),
        ("Tom sold the car to Ana and Ana left town and we had tea.", 0.75),
        ("Tom sold the car to Ana and Ana left town and Ana left town.", 0.75),
        ("Lee sold the car to Ana and Ana left town.", 0.0),
        ("Tom sold the the.", -0.5),
    ],
)
def test_tldr_counts_facts_told_wrong_fillers_and_repetitions(summary: str, expected: float):
    assert summaries.quality(POST, summary) == expected


def test_tldr_has_posts_apart_whose_good_summaries_are_good():
    made = {split: list(islice(summaries.posts(split, random.Random(0)), 100)) for split in summaries.SPLITS}
    assert_apart({split: {frozenset(post.salient) for post in posts} for split, posts in made.items()})
    for post in made["train"]:
        assert all(summaries.quality(post, text) == 1 for text in post.good_summaries)
        words = post.query.replace(".", " ").split()
        assert all(word in words for clause in post.salient for word in clause.split())


def test_a_starting_model_has_the_size_that_is_named_and_the_same_bits_for_a_seed(tmp_path: Path):
    brief = replace(lesson("0.3m"), max_steps=3, noise_steps=2)
    reports = [make(brief, tmp_path / name, seed=3) for name in ("a", "b")]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 300_000 < reports[0]["num_parameters"] < 400_000
    make(replace(TALLY, max_steps=1, noise_steps=1), tmp_path / "tally", seed=0)
    searcher = load_recipe(WORLDS / "tally/tally.toml").searcher
    longest = searcher.max_prompt_tokens + searcher.max_response_tokens
    assert longest <= json.loads((tmp_path / "tally" / "config.json").read_text())["max_position_embeddings"]


def test_answers_to_prompts_of_different_lengths_have_the_probability_of_each_alone():
    tokenizer = build_tokenizer(TALLY.characters, TALLY.max_length_tokens)
    torch.manual_seed(0)
    model = build_model(tokenizer, TALLY.shape)
    pairs = TALLY.validation()[:6]
    assert len({len(prompt) for prompt, _ in pairs}) > 1
    inputs, answers = encode(pairs, tokenizer)
    assert (answers >= 0).sum(dim=1).tolist() == [len(response) + 1 for _, response in pairs]
    with torch.no_grad():
        together = answer_logprobs(model, inputs, answers).sum(dim=1)
        alone = [answer_logprobs(model, *encode([pair], tokenizer)) for pair in pairs]
    torch.testing.assert_close(together, torch.stack([each.sum() for each in alone]), rtol=1e-4, atol=1e-3)
    assert tokenizer.unk_token_id not in inputs
