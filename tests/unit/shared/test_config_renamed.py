"""Names of older releases: refusals name the new ones, and stored configs of older runs can still be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe, load_recipe
from tba.config.recipe_file import _model_at
from tba.config.renamed_keys import RENAMED_KEYS, new_name, with_new_names
from tba.errors import ConfigError
from tba_cli.local.resume import recipe_file_of, resume_recipe
from tba_cli.resolve import made_with_other
from tba_cli.run_folder import RunFolder

MINIMAL = '[run]\nname = "r"\n[model]\npath = "m"\n[data]\npath = "p.jsonl"\n'
OLD = MINIMAL + '[searcher]\nwhen_over = "wait"\n[scaling]\nrelease_when_over = false\n'
NEW = OLD.replace("release_when_over", "scale_down_on_run_end").replace("when_over", "on_run_end")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_every_renamed_key_leads_to_a_key_that_there_is(old: str, new: str) -> None:
    for name, is_known in ((old, False), (new, True)):
        *path, last = name.split(".")
        section = _model_at(path, Recipe)
        assert section is not None
        assert (last in section.model_fields) == is_known
    assert old.rpartition(".")[0] == new.rpartition(".")[0], "a key moves within its section alone"


def test_an_old_key_is_refused_with_its_new_name(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", OLD)
    now = "key 'searcher.when_over' is now 'searcher.on_run_end': write the new name"
    with pytest.raises(ConfigError, match=rf"r.toml: {now} \(and 1 more\)"):
        load_recipe(path, environ={})
    fine = write(tmp_path / "fine.toml", MINIMAL)
    with pytest.raises(ConfigError, match=f"environment variable TBA_SEARCHER__WHEN_OVER: {now}"):
        load_recipe(fine, environ={"TBA_SEARCHER__WHEN_OVER": "wait"})
    with pytest.raises(ConfigError, match=f"--set searcher.when_over=wait: {now}"):
        load_recipe(fine, environ={}, sets=["searcher.when_over=wait"])
    item = write(tmp_path / "item.toml", MINIMAL + '[[prepare]]\npath = "m"\nkind = "model"\nby_hand = "ask"\n')
    with pytest.raises(ConfigError, match=r"key 'prepare\.0\.by_hand' is now 'prepare\.manual'"):
        load_recipe(item, environ={})
    warm = write(tmp_path / "warm.toml", MINIMAL + '[model.warm_start]\ntask = "addition"\nschool_max_steps = 1\n')
    with pytest.raises(ConfigError, match=r"school_max_steps' is now 'model\.warm_start\.max_steps'"):
        load_recipe(warm, environ={})


@pytest.mark.parametrize(
    ("old", "new"), [("raise_m", "raise_most_on_policy_prob"), ("lower_rate", "lower_learning_rate")]
)
def test_an_old_value_is_refused_with_its_new_name(tmp_path: Path, old: str, new: str) -> None:
    path = write(tmp_path / "r.toml", MINIMAL + f'[trainer.guards.ess_collapse]\naction = "{old}"\n')
    now = f"value '{old}' of 'trainer.guards.ess_collapse.action' is now '{new}': write the new name"
    with pytest.raises(ConfigError, match=f"r.toml: {now}$"):
        load_recipe(path, environ={})
    fine = write(tmp_path / "fine.toml", MINIMAL)
    with pytest.raises(ConfigError, match=now):
        load_recipe(fine, environ={}, sets=[f"trainer.guards.ess_collapse.action={old}"])


def test_a_stored_config_of_an_older_release_is_read(tmp_path: Path) -> None:
    warm_start = {"task": "addition", "school_accuracy": 0.6, "school_max_steps": 7, "careless_steps": 3}
    stored: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "m", "warm_start": warm_start},
        "data": {"path": "p.jsonl"},
        "searcher": {"when_over": "wait"},
        "scaling": {"release_when_over": False},
        "trainer": {"guards": {"raise_m_by": 0.3, "lower_rate_factor": 0.2, "ess_collapse": {"action": "raise_m"}}},
        "prepare": [{"path": "a", "kind": "model", "by_hand": "ask"}, {"path": "b", "kind": "model", "maker": "gpt2"}],
    }
    before = json.dumps(stored)
    recipe = load_recipe(write(tmp_path / "config.json", before), environ={})
    section = recipe.model.warm_start
    assert section is not None
    assert (section.target_accuracy, section.max_steps, section.noise_steps) == (0.6, 7, 3)
    assert (recipe.searcher.on_run_end, recipe.scaling.scale_down_on_run_end) == ("wait", False)
    guards = recipe.trainer.guards
    assert (guards.raise_most_on_policy_prob_by, guards.lower_learning_rate_factor) == (0.3, 0.2)
    assert guards.ess_collapse.action == "raise_most_on_policy_prob"
    assert [item.manual for item in recipe.prepare] == ["ask", None]
    with_new_names(stored)
    assert json.dumps(stored) == before, "the document itself stays"
    assert new_name(["searcher", "on_run_end"]) is None


def test_a_run_of_an_older_release_resumes(tmp_path: Path) -> None:
    """The file of its recipe may have the old names still, or the new ones; neither is a change."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    stored = json.loads(load_recipe(write(tmp_path / "new.toml", NEW), environ={}).model_dump_json())
    stored["searcher"]["when_over"] = stored["searcher"].pop("on_run_end")
    stored["trainer"]["guards"]["ess_collapse"]["action"] = "raise_m"
    write(folder.recipe_path, json.dumps(stored))
    old = write(tmp_path / "old.toml", OLD)
    sets = ["searcher.when_over=wait", "run.seed=3", 'trainer.guards.ess_collapse.action="raise_m"']
    began = recipe_file_of(old, sets, {"TBA_SCALING__RELEASE_WHEN_OVER": "false"})
    write(folder.recipe_file_path, began.model_dump_json())

    said: list[str] = []
    for path in (None, old, tmp_path / "new.toml"):
        recipe, known = resume_recipe(folder, path, [], take_changes=False, on_difference=said.append)
        assert recipe.searcher.on_run_end == "wait"
        assert known is not None
        action = 'trainer.guards.ess_collapse.action="raise_most_on_policy_prob"'
        assert known.sets == ["searcher.on_run_end=wait", "run.seed=3", action]
        assert known.environ == {"TBA_SCALING__SCALE_DOWN_ON_RUN_END": "false"}
    assert said == []
    changed = write(tmp_path / "changed.toml", NEW + "[trainer]\nnum_steps = 7\n")
    taken, _ = resume_recipe(folder, changed, [], take_changes=True, on_difference=said.append)
    assert (taken.trainer.num_steps, taken.searcher.on_run_end, taken.scaling.scale_down_on_run_end) == (
        7,
        "wait",
        False,
    )
    assert len(said) == 1


def test_the_report_of_a_starting_model_that_an_older_release_made_still_fits(tmp_path: Path) -> None:
    text = MINIMAL + '[model.warm_start]\ntask = "addition"\nmax_steps = 7\n'
    recipe = load_recipe(write(tmp_path / "r.toml", text), environ={})
    assert recipe.model.warm_start is not None
    settings = recipe.model.warm_start.model_dump(mode="json")
    old = {"school_accuracy": settings.pop("target_accuracy"), "school_max_steps": settings.pop("max_steps")}
    old["careless_steps"] = settings.pop("noise_steps")
    for steps, differs in ((7, None), (8, "max_steps = 8, not 7")):
        report = {"settings": {**settings, **old, "school_max_steps": steps}, "seed": 0}
        assert made_with_other(json.dumps(report).encode(), recipe, where="there") == differs
