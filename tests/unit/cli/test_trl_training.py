"""What is refused before and after TRL makes a model of `[[prepare]]`; tests/e2e/test_trl.py runs the real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe, load_recipe
from tba.errors import ChildError, ConfigError
from tba_cli.artifacts.prepared import is_there, needed, training_inputs
from tba_cli.console import Console
from tba_cli.setup import trl_training
from tba_cli.setup.prepare import prepare_at_start

FILES = ("config.json", "model.safetensors", "tokenizer_config.json")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A policy and a judge of it, both of TRL, and a base that is here; the files of settings lie beside the recipe."""
    monkeypatch.chdir(tmp_path)
    scorers = [{"kind": "reward_model", "model": "judge", "append_eos": True}]
    document: dict[str, Any] = {"run": {"name": "r"}, "model": {"path": "policy"}}
    document |= {"data": {"sets": [{"task": "t", "texts": ["x"]}]}, "reward": {"tasks": {"t": {"scorers": scorers}}}}
    document["prepare"] = [
        {"path": "base", "kind": "model", "manual": "make it"},
        {"path": "policy", "kind": "model", "trl_sft": "sft.yaml", "at_start": True},
        {"path": "judge", "kind": "model", "trl_reward": "judge.yaml", "at_start": True},
    ]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipe.json").write_text(json.dumps(document))
    for name in ("sft.yaml", "judge.yaml"):
        (tmp_path / "recipes" / name).write_text("max_steps: 1\n")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()
    return load_recipe("recipes/recipe.json", environ={})


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[list[str]]:
    """Let a function stand for TRL that writes a model of one output; `changes` are of its files."""
    calls: list[list[str]] = []

    def run(_module: str, words: list[str]) -> None:
        calls.append(words)
        folder = Path(words[words.index("--output_dir") + 1])
        (folder / "checkpoint-1").mkdir(parents=True, exist_ok=True)
        config = {"id2label": {"0": "LABEL_0"}, "pad_token_id": 0, "eos_token_id": 1}
        files = {**dict.fromkeys(FILES, "{}"), "config.json": json.dumps(config), "training_args.bin": "", **changes}
        for name, text in files.items():
            if text is not None:
                (folder / name).write_text(text)

    monkeypatch.setattr(trl_training, "run_in_sight", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    return calls


def test_models_are_made_in_their_order_and_only_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch)
    assert training_inputs(recipe) == {"base"}
    prepare_at_start(recipe, Console("quiet"))
    prepare_at_start(recipe, Console("quiet"))
    folder = Path.cwd()
    assert [words[:3] for words in calls] == [
        ["sft", "--config", str(folder / "recipes" / "sft.yaml")],
        ["reward", "--config", str(folder / "recipes" / "judge.yaml")],
    ]
    assert {path.name for path in (folder / "judge").iterdir()} == {*FILES, ".tba-prepare"}
    assert [item.path for item in needed(recipe)] == ["policy", "judge"], "the base has served"
    (folder / "recipes" / "judge.yaml").write_text("max_steps: 2\n")
    with pytest.raises(ConfigError, match=r"judge holds trl reward, .* the recipe asks for .* remove that folder"):
        is_there(recipe.prepare[2])


def test_what_an_earlier_training_left_is_no_part_of_the_next(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **{"adapter_config.json": "{}", "model-2.safetensors": "{}"})
    with pytest.raises(ConfigError, match="holds an adapter"):
        prepare_at_start(recipe, Console("quiet"))
    assert len(list(Path().glob(".policy.*.partial/checkpoint-1"))) == 1
    (Path("recipes") / "sft.yaml").write_text("use_peft: false\n")
    use(monkeypatch)
    prepare_at_start(recipe, Console("quiet"))
    assert {path.name for path in Path("policy").iterdir()} == {*FILES, ".tba-prepare"}
    assert not list(Path().glob(".policy.*"))


def test_a_model_that_is_there_needs_no_file_of_settings(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    prepare_at_start(recipe, Console("quiet"))
    Path("recipes/sft.yaml").unlink()
    assert is_there(recipe.prepare[1])


def test_what_is_missing_is_said_before_anything_is_fetched(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"policy needs trl.*pip install trl"):
        prepare_at_start(recipe, Console("quiet"))
    Path("recipes/sft.yaml").unlink()
    with pytest.raises(ConfigError, match=r"settings, .*sft\.yaml, cannot be read: No such file"):
        prepare_at_start(recipe, Console("quiet"))
    (Path("base") / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"needs base \(model\), not there yet"):
        prepare_at_start(recipe, Console("quiet"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter_config.json": "{}"}, "holds an adapter; merge it"),
        ({"model.safetensors": None}, "no config.json with safetensors files"),
        ({"tokenizer_config.json": None}, "holds no tokenizer"),
        ({"config.json": "{}"}, r"not exactly one output \(num_labels\)"),
    ],
)
def test_a_model_that_tba_cannot_use_gets_no_place(recipe, monkeypatch, changes, message):
    use(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=message):
        trl_training.train(recipe.prepare[2], Console("quiet"))
    assert not Path("judge").exists()


def test_a_failure_names_the_command(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_training, "PROGRAM", "tba_cli.no_such_program")
    with pytest.raises(ChildError, match=r"policy: `trl sft --config .*sft\.yaml` failed \(exit code 1\)"):
        trl_training.train(recipe.prepare[1], Console("quiet"))


def test_a_scorer_reads_the_score_where_trl_trained_it(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    trl_training.train(recipe.prepare[2], Console("quiet"))
    trl_training.check_scorers(recipe)
    # then the end of sequence counts as padding
    (Path("judge") / "config.json").write_text(json.dumps({"pad_token_id": 1, "eos_token_id": 1}))
    with pytest.raises(ConfigError, match=r"tasks\.t: judge has learned .* before the end .* append_eos = false"):
        trl_training.check_scorers(recipe)
