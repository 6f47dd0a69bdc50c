"""A task of one's own from `tba init` to a finished run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waits import DEADLINE_S

Tba = Callable[..., subprocess.CompletedProcess[str]]
SHORT = ("--set", "trainer.num_steps=2", "--set", "eval.every_steps=1000", "--set", "eval.num_prompts_final=4")


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    done = run_python(place, "-m", "tba_cli.main", "init", "mytask")
    assert done.returncode == 0, done.stderr
    return place / "mytask"


@pytest.fixture(scope="module")
def tba(folder: Path) -> Tba:
    return lambda *words: run_python(folder, "-m", "tba_cli.main", *words)


@pytest.fixture(scope="module")
def finished(tba: Tba, folder: Path, model: Path) -> str:
    """The name of a run with all defaults of the new recipe but its length."""
    # without this, most of its time would go into the starting model
    shutil.copytree(model, folder / "models" / "mytask-0")
    done = tba("run", "mytask.toml", *SHORT)
    assert done.returncode == 0, done.stderr + done.stdout
    return "mytask"


def read(done: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_the_recipe_is_right_and_the_examples_get_what_they_should(tba: Tba, folder: Path) -> None:
    gold = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])["data"]["answer"]
    checked = read(tba("config", "check", "mytask.toml", "--json"))
    assert checked["counts"]["fail"] == 0
    assert [result["found"] for result in checked["results"] if result["code"] == "scorer"] == [
        f"task 'mytask': made-up responses score: '1' 0, data.answer {gold!r} 1"
    ]
    scored = read(tba("score", "examples.jsonl", "--recipe", "mytask.toml", "--json"))
    assert (scored["num_mismatches"], scored["num_errors"]) == (0, 0)
    assert [row["result"]["reward"] for row in scored["examples"]] == [1.0, 0.5, 0.0, 0.0]


def test_a_run_trains_on_the_rewards_of_the_scorer(finished: str, folder: Path) -> None:
    summary = json.loads((folder / "runs" / finished / "summary.json").read_text())
    assert (summary["state"], summary["rollouts_failed"], summary["rollouts_trained"] > 0) == ("done", 0, True)
