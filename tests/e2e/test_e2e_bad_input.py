"""Bad input that only real services find, or that `tba run` finds in the recipe: one sentence, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

from tba_cli.main import main
from tests.e2e.conftest import MakePlace


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"buffer": {"port": 0, "max_rollouts": 3}}, "no batch could ever be drawn"),
        (
            {"reward": {"port": 0, "tasks": {"t": {"scorers": [{"kind": "python", "function": "no_such_module:f"}]}}}},
            "there is no module 'no_such_module'",
        ),
    ],
)
def test_what_only_a_service_can_refuse_ends_the_run_with_its_sentence(
    make_place: MakePlace, sections: dict[str, Any], sentence: str
) -> None:
    place = make_place(**sections)
    started = place.start()
    assert started.wait() in (1, 2)
    assert started.err.startswith("error: ")
    assert started.err.count("\n") == 1
    assert sentence in started.err
    assert "Traceback" not in started.out + started.err
    assert place.pids() == []
    assert not (place.folder / "recipe.json").exists(), "there is nothing to resume"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "data.num_heldout=100000"], "task 'addition' has"),
        (["--set", "data.generator=nonsense"], "data.generator 'nonsense' is not known ("),
        (["--set", "auth.tokens_file=nowhere.json"], "nowhere.json cannot be read"),
        (["--set", "store.url=ftp://x"], "store.url 'ftp://x' is not a store"),
        (["--set", "store.url=file:///proc/x"], "correct store.url"),
        (["--set", "local.runs_dir=recipe.json"], "recipe.json"),
        (["--run-name", "../x"], "key 'run.name' has the value '../x'"),
        (["--seed", "-1"], "key 'run.seed' has the value -1"),
    ],
)
def test_a_value_that_cannot_be_is_one_sentence(
    make_place: MakePlace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    place = make_place()
    monkeypatch.chdir(place.path)
    assert main(["run", "recipe.json", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert sentence in said
    assert not place.folder.exists()
