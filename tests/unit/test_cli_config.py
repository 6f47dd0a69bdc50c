"""`tba config` on good and bad recipes; what `tba config check` looks at beside the recipe is in
tests/integration/test_config_check.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba_cli.main import main

RECIPE = '[run]\nname = "demo"\n[model]\npath = "m"\n[data]\ngenerator = "addition"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(RECIPE)
    return path


def test_check_names_an_unknown_key_and_the_nearest_one(recipe, capsys):
    recipe.write_text(RECIPE + "[trainer]\nnum_step = 5\n")
    assert main(["config", "check", str(recipe)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'trainer.num_step'" in err
    assert "'num_steps'" in err


def test_show_prints_what_the_recipe_and_the_flags_result_in(recipe, capsys):
    assert main(["config", "show", str(recipe), "--set", "trainer.num_steps=7"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trainer"]["num_steps"] == 7
    assert document["run"] == {"name": "demo", "seed": 0, "snapshot": None, "fork_version": None}


def test_schema_describes_every_section_with_help_texts(capsys):
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert "every k optimizer steps" in schema["$defs"]["TrainerSection"]["properties"]["sync_interval"]["description"]
