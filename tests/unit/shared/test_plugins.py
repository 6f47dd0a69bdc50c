"""Objects that a recipe names: how they are found, and the sentences about those that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tba_searcher.engines.factory import build_engine
from tba_trainer.tracking import open_trackers

from tba import plugins
from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError
from tba.versions import START
from tests.support.trainer_values import RecordedBuffer

REMEDY = "correct objective.preset, install its package, or put the folder of its module on PYTHONPATH"
MODULE = """
import sys
from tba.errors import ConfigError

NUMBER = 7

def function(*arguments):
    return None

def raises(*arguments):
    raise RuntimeError("no licence")

def leaves(*arguments):
    sys.exit("no licence")

def refuses(*arguments):
    raise ConfigError("set MY_KEY")

class Outer:
    class Inner:
        pass
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder, which is not on the path yet."""
    (tmp_path / "my_plugins.py").write_text(MODULE)
    (tmp_path / "spoilt.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_plugins", raising=False)


def load(value: str) -> Any:
    return plugins.load(value, what="objective.preset")


def recipe(**sections: dict[str, Any]) -> Recipe:
    document = {"run": {"name": "demo"}, "model": {"path": "m"}, "data": {"generator": "addition"}, **sections}
    return parse_recipe(document, where="test")


def test_an_import_path_names_a_member_of_a_module_in_the_current_folder() -> None:
    assert load("my_plugins:function").__name__ == "function"
    assert load("my_plugins:Outer.Inner").__name__ == "Inner"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such:f", rf"cannot be imported .ModuleNotFoundError: No module named 'no_such'.; {REMEDY}"),
        ("my_plugins:no_such", f"cannot be imported .AttributeError.*; {REMEDY}"),
        ("spoilt:f", f"cannot be imported .*No module named 'no_such_library'.; {REMEDY}"),
        ("my_plugins:NUMBER", f"is a int and not a function or class; {REMEDY}"),
        ("my_plugins:", "is not known, and no import path; write MODULE:NAME"),
        ("../my_plugins.py:f", "is not known, and no import path; write MODULE:NAME"),
    ],
)
def test_an_object_that_cannot_be_loaded_is_named_with_the_remedy(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^objective.preset '{value}' {says}"):
        load(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("my_plugins:leaves", r"tracking.trackers 'my_plugins:leaves' failed \(SystemExit: no licence\); correct"),
        ("my_plugins:raises", r"tracking.trackers 'my_plugins:raises' failed \(RuntimeError: no licence\); correct"),
        ("my_plugins:refuses", "^set MY_KEY$"),
        ("my_plugins:function", "made None, which lacks members of tba_trainer.tracking.tracker.Tracker; add them"),
    ],
)
def test_a_tracker_that_cannot_be_built_keeps_the_trainer_from_starting(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_trackers(recipe(tracking={"trackers": [value]}), RecordedBuffer())  # pyright: ignore[reportArgumentType]


def test_an_engine_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'my_plugins:function' made None, which lacks members of .*engine\.Engine;"):
        build_engine(recipe(searcher={"engine": "my_plugins:function"}), tmp_path, START, None, seed=0)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"objective": {"preset": "grop"}}, r"key 'objective.preset' has the value 'grop'.*known are tb, .*'grpo'\?$"),
        ({"objective": {"preset": "GRPO"}}, r"no import path; did you mean 'grpo'\?$"),
        ({"objective": {"preset": "m:f", "anchor": "behaviour", "beta": 0.1}}, "the KL of the objective m:f is to a"),
        ({"objective": {"preset": "m:f", "anchor": "reset"}}, "m:f has beta 0 and so no KL"),
        ({"objective": {"preset": "m f:g"}}, "no import path; write MODULE:NAME"),
        ({"objective": {"preset": 3}}, "objective.preset"),
        ({"searcher": {"engine": "vlm"}}, r"searcher.engine' has the value 'vlm'.*known are embedded, vllm, openai, "),
    ],
)
def test_the_config_refuses_misspelt_names_without_an_import(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        recipe(**sections)
    assert "\n" not in str(caught.value)


def test_an_objective_from_outside_has_no_kl_unless_asked_for_and_all_settings_are_its_own() -> None:
    objective = recipe(objective={"preset": "m:f", "importance_clamp": 2.0}).objective
    assert (objective.beta.at(0), objective.needs_reference, objective.parts) == (0.0, False, None)
    assert recipe(objective={"preset": "m:f", "beta": 0.1}).objective.used_anchor == "fixed"
    alone = {"group_size": 1}
    assert recipe(objective={"preset": "m:f"}, sampling=alone).sampling.group_size == 1
