"""Shipped recipes, compose environment and chart environment are parsed by the real config models."""

import re
from pathlib import Path

import pytest
import yaml

from tba.config import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_shipped_recipe_parses(path: Path):
    assert load_recipe(path, environ={}).run.name


def test_there_is_a_quickstart_recipe():
    assert ROOT / "recipes/quickstart.toml" in RECIPES


def test_the_compose_environment_is_made_of_real_keys():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    environ = {k: str(v) for k, v in compose["x-env"].items()}
    assert len(environ) >= 8
    recipe = load_recipe(ROOT / "recipes/quickstart.toml", environ=environ)
    assert recipe.buffer_url == "http://buffer:8700"
    assert recipe.reward_url == "http://reward:8701"


def test_the_chart_environment_is_made_of_real_keys():
    text = (ROOT / "charts/tba/templates/_helpers.tpl").read_text()
    names = re.findall(r"name: (TBA_\w+)", text)
    assert len(names) >= 8
    values = {name: "8700" if name.endswith("PORT") else "x" for name in names}
    assert load_recipe(ROOT / "recipes/quickstart.toml", environ=values).buffer.port == 8700
