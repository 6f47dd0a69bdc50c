"""Prompts from code that is not ours: a function by its import path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba_cli.commands.config import check_command
from tba_cli.generators import load_prompt_source
from tba_cli.parser import parse_arguments
from tba_cli.prompts.reader import prompts_of
from tests.support.buffer import make_recipe

MODULE = """
from tba.api import Prompt

def squares(num_train, num_heldout, seed):
    splits = ["train"] * num_train + ["heldout"] * num_heldout
    return [
        Prompt(prompt_id=f"square-{n}", task="exact", text=f"{n}*{n}=", data={"answer": str(n * n)}, split=split)
        for n, split in enumerate(splits, start=seed)
    ]

def twice(num_train, num_heldout, seed):
    return squares(1, 1, seed) * 2

def broken(num_train, num_heldout, seed):
    return 1 // 0

def words(num_train, num_heldout, seed):
    return ["not a prompt"]

NUMBER = 7
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_prompts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_prompts", raising=False)


def test_a_function_of_the_current_folder_makes_the_prompts() -> None:
    data = {"generator": "my_prompts:squares", "num_train": 2, "num_heldout": 1}
    prompts = prompts_of(make_recipe(data=data))
    assert [(prompt.text, prompt.split) for prompt in prompts] == [
        ("0*0=", "train"),
        ("1*1=", "train"),
        ("2*2=", "heldout"),
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sqares", "is not known .known are addition., and no import path; write MODULE:NAME"),
        ("no_such_module:f", "cannot be imported .ModuleNotFoundError: No module named 'no_such_module'"),
        ("my_prompts:no_such_name", "cannot be imported .AttributeError"),
        ("my_prompts:NUMBER", "is a int and not a function"),
        ("my_prompts:broken", "failed .ZeroDivisionError"),
        ("my_prompts:words", "must be a tba.api.Prompt"),
        ("my_prompts:twice", "made the prompt_id 'square-0' twice"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"data.generator '{name}' {says}|{says}"):
        load_prompt_source(name)(1, 1, 0)


def test_the_config_check_says_that_a_source_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[run]\nname = "demo"\n[model]\npath = "m"\n[data]\ngenerator = "no_such_module:f"\n')
    assert check_command(parse_arguments(["config", "check", str(recipe), "--offline"])) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("FAIL prompts: data.generator")]
    assert "cannot be imported" in lines[at]
    assert lines[at + 1].endswith("put the folder of its module on PYTHONPATH")
