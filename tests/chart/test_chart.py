"""The minimal chart lints and renders with the real Helm, and says what is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELM = shutil.which("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on PATH")

GOOD = ["--set-file", f"recipe={ROOT / 'recipes/quickstart.toml'}", "--set", "tokensSecret=t,store.url=s3://bucket"]


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *args], capture_output=True, text=True, timeout=60)


def test_the_chart_lints():
    done = helm("lint", "--strict", str(ROOT / "charts/tba"), *GOOD)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_renders_every_component():
    done = helm("template", "t", str(ROOT / "charts/tba"), *GOOD)
    assert done.returncode == 0, done.stderr
    for name in ("t-buffer", "t-reward", "t-searcher", "t-trainer", "t-redis", "t-recipe"):
        assert f"name: {name}\n" in done.stdout
    assert "[run]" in done.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--set", "tokensSecret=t,store.url=s3://b"], "recipe is required"),
        ([*GOOD[:2], "--set", "store.url=s3://b"], "tokensSecret is required"),
        ([*GOOD[:2], "--set", "tokensSecret=t"], "store.url is required"),
    ],
)
def test_a_missing_value_is_named(args: list[str], sentence: str):
    done = helm("template", "t", str(ROOT / "charts/tba"), *args)
    assert done.returncode != 0
    assert sentence in done.stderr
