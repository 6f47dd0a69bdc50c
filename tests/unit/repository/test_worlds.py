"""Every world of examples/worlds: its recipe, its prompts, and the program that makes its models."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tba.config import Recipe, load_recipe
from tba_cli.prompts.reader import prompts_of

WORLDS = Path(__file__).parents[3] / "examples/worlds"
RECIPES = sorted(WORLDS.glob("*/*.toml"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def world(request: pytest.FixtureRequest) -> tuple[Path, Recipe]:
    return request.param, load_recipe(request.param, environ={})


def test_every_world_has_a_recipe():
    assert {path.parent.name for path in RECIPES} == {"chain", "gsm8k", "math", "redteam", "tally", "tldr"}


def test_its_prompts_are_of_its_tasks_and_the_same_again(world: tuple[Path, Recipe]):
    _, recipe = world
    prompts = prompts_of(recipe)
    assert {prompt.split for prompt in prompts} == {"train", "heldout"}
    assert {prompt.task for prompt in prompts} <= recipe.reward.tasks.keys()
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
