"""`tba setup --check-run`: an upgrade's recipe is compared with the run under way, before anything is touched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tba.api import RunInfo
from tba.config import Recipe
from tba.errors import BadReplyError, UnauthorizedError, UnavailableError
from tba_cli.main import main
from tba_cli.setup import check_against_run, upgrade
from tests.support.buffer import make_recipe

ANSWER = {
    "state": "running",
    "state_reason": None,
    "step": 40,
    "lineage": 2,
    "parents": {},
    "latest_version": None,
    "checkpoint": None,
    "checkpoint_key": None,
    "components": [],
    "waits": [],
    "evals": [],
}


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    made = make_recipe()
    document = made.model_dump(mode="json") | {"store": {"url": f"file://{folder}/store"}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document[section] = {**document[section], name: value}
    return Recipe.model_validate(document)


def said(recipe: Recipe, answer: RunInfo | Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the message of the check for a recipe while a buffer answers so."""

    class Buffer:
        def __init__(self, url: str, **how: Any) -> None: ...

        def run(self) -> RunInfo:
            if isinstance(answer, Exception):
                raise answer
            return answer

        def close(self) -> None: ...

    monkeypatch.setattr(upgrade, "BufferClient", Buffer)
    lines: list[str] = []
    try:
        check_against_run(recipe, wait_s=1, on_progress=lines.append)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(lines)


def going(recipe: Recipe, **changes: Any) -> RunInfo:
    return RunInfo.model_validate({**ANSWER, "run": recipe.run.name, "constants": recipe.constants, **changes})


def test_what_may_change_lets_the_run_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = recipe_of(tmp_path), recipe_of(tmp_path, trainer__sync_interval=7, buffer__max_rollouts=99)
    assert "can continue with this recipe" in said(new, going(old), monkeypatch)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.policy_temperature", 0.5),
        ("model.dtype", "bfloat16"),
        ("model.path", "models/other"),
        ("run.name", "other"),
        ("store.url", "s3://other/tba"),
    ],
)
def test_what_is_constant_within_a_run_is_refused_by_name_and_both_values(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = recipe_of(tmp_path), recipe_of(tmp_path, **{key.replace(".", "__"): value})
    text = said(new, going(old), monkeypatch)
    assert text.startswith("ConfigError: run ")
    assert f"{key} is {value!r} and was {old.constants[key]!r}" in text
    assert "tba stop" in text


def test_a_store_that_lacks_the_runs_newest_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    text = said(recipe, going(recipe, latest_version="2-40"), monkeypatch)
    assert "its weight version 2-40 is not in file://" in text
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "done", "run": "another"},
        {"state": "failed", "run": "another"},
        {"lineage": 0, "step": 0, "run": "another"},
    ],
    ids=["done", "failed", "not begun"],
)
def test_where_no_run_continues_any_recipe_may_follow(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no training is in progress" in said(recipe_of(tmp_path), going(recipe_of(tmp_path), **changes), monkeypatch)


def test_a_failed_run_is_compared_since_the_next_trainer_continues_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = recipe_of(tmp_path), recipe_of(tmp_path, model__policy_temperature=0.5)
    assert "ConfigError" in said(new, going(old, state="failed"), monkeypatch)


@pytest.mark.parametrize("error", [UnavailableError("http://b is away"), BadReplyError("another release")])
def test_a_buffer_that_cannot_answer_hinders_no_upgrade(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(recipe_of(tmp_path), error, monkeypatch) == f"nothing to compare with: {error}"


def test_a_wrong_token_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "UnauthorizedError" in said(recipe_of(tmp_path), UnauthorizedError("401"), monkeypatch)


def test_the_command_compares_and_does_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[run]\nname = "r"\n[model]\npath = "m"\n[data]\npath = "p"\n[buffer]\nurl = "http://127.0.0.1:9"\n'
    )
    assert main(["setup", "--config", str(recipe), "--check-run", "--wait-s", "0.1"]) == 0
    assert "nothing to compare with" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [recipe]
