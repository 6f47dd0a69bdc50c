"""Changes of live settings as people read them, on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from tba.api import SettingsInfo
from tba.clients import BufferClient
from tba_cli.commands.control import settings_lines
from tba_cli.main import main


def audit(revision: int, changes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "revision": revision,
        "at_s": 1.0,
        "role": "operator",
        "reason": None,
        "lineage": 1,
        "step": 4,
        "changes": {name: {"old": old, "new": new} for name, (old, new) in changes.items()},
        **more,
    }


def info(*changes: dict[str, Any], next: int | None = None) -> SettingsInfo:
    recipe = {"learning_rate": 1e-4, "beta": 0.05, "most_on_policy_prob": 0.5, "sampling_temperature": 1}
    document = {"revision": 2, "settings": {"beta": 0.2}, "recipe": {**recipe, "eval_every_steps": 50}, "next": next}
    now = {**recipe, "beta": 0.2, "eval_every_steps": 50}
    return SettingsInfo.model_validate({**document, "now": now, "changes": list(changes)})


FIRST = audit(1, {"beta": (None, 0.2)}, reason="<diverges>")
SECOND = audit(2, {"learning_rate": (2e-5, None), "eval_every_steps": (None, 7)}, role="trainer")


def test_a_change_names_who_when_and_what() -> None:
    assert [change.line() for change in info(FIRST, SECOND).changes] == [
        "revision 1, by the operator after step 4: beta recipe -> 0.2 (<diverges>)",
        "revision 2, by the trainer after step 4: learning_rate 2e-05 -> recipe, eval_every_steps recipe -> 7",
    ]


def test_what_holds_is_shown_beside_what_the_recipe_says() -> None:
    lines = settings_lines(info(FIRST))
    assert lines[:2] == ["learning_rate: recipe, now 0.0001", "beta: 0.2 (recipe: 0.05), now 0.2"]
    assert lines[5].startswith("revision 1")


def test_all_pages_of_the_changes_are_read() -> None:
    class Client:
        def settings(self, *, after: int = 0) -> SettingsInfo:
            return info(FIRST, next=1) if after == 0 else info(SECOND)

    whole = BufferClient.all_settings(Client())  # pyright: ignore[reportArgumentType]
    assert [change.revision for change in whole.changes] == [1, 2]


@pytest.mark.parametrize("words", [["a", "b", "beta=1"], ["a", "beta=1", "--url", "http://127.0.0.1:1"]])
def test_a_word_that_is_no_setting_is_the_one_name_of_the_run(words: list[str], capsys: pytest.CaptureFixture) -> None:

    assert main(["set", *words]) == 2
    assert "is neither KEY=VALUE nor the only name of a run" in capsys.readouterr().err


def test_a_setting_that_is_given_twice_is_refused_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set", "beta=0.1", "beta = 0.2", "--url", "http://127.0.0.1:1"]) == 2
    assert "'beta' is given twice, the second time as 'beta = 0.2'" in capsys.readouterr().err
