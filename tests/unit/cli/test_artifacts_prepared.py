"""Folders that a run needs: there or not, whole or not, and what the recipe asks for or something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tba.config import Recipe, parse_recipe
from tba.config.data import PrepareItem
from tba.config.supervised import REPORT_FILE, SftSection
from tba.errors import ConfigError
from tba_cli.artifacts.prepared import (
    HALF_DONE,
    RECORD,
    begin_record,
    check_prepared,
    is_there,
    is_trained,
    made_at_start,
    needed,
    read_record,
    training_inputs,
    write_record,
)


def item(folder: Path, **changes: object) -> PrepareItem:
    return PrepareItem.model_validate({"path": str(folder), "kind": "model", "hub": "org/name", **changes})


def recipe(*items: Mapping[str, object]) -> Recipe:
    part = {"task": "t", "texts": ["x"]}
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": part, "heldout": part}}
    return parse_recipe({**document, "prepare": list(items)}, where="test")


def filled(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_there_once_it_is_whole(tmp_path):
    wanted = item(tmp_path / "m")
    assert not is_there(wanted)
    (tmp_path / "m").mkdir()
    assert not is_there(wanted), "it is empty"
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / HALF_DONE).touch()
    assert not is_there(wanted), "a download did not end"
    write_record(wanted, commit="c0ffee")
    assert is_there(wanted)
    assert read_record(tmp_path / "m") == {"origin": wanted.origin, "commit": "c0ffee"}


def test_a_folder_of_a_persons_own_is_taken_as_it_is(tmp_path):
    assert is_there(item(filled(tmp_path / "m")))


def test_a_folder_with_something_else_is_not_overwritten(tmp_path):
    filled(tmp_path / "m")
    write_record(item(tmp_path / "m"), commit="c0ffee")
    for other in (item(tmp_path / "m", hub="org/other"), item(tmp_path / "m", revision="v2")):
        with pytest.raises(ConfigError, match=r"holds hub org/name, and the recipe asks for hub org/.*; remove that"):
            is_there(other)


def test_half_of_one_thing_is_not_completed_with_another(tmp_path):
    filled(tmp_path / "m")
    begin_record(item(tmp_path / "m"))
    assert not is_there(item(tmp_path / "m")), "it continues where it stopped"
    with pytest.raises(ConfigError, match=r"holds a part of hub org/name, and the recipe asks for hub org/other"):
        is_there(item(tmp_path / "m", hub="org/other"))


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path):
    (tmp_path / "m").touch()
    with pytest.raises(ConfigError, match=r"m is a file, and must be a folder"):
        is_there(item(tmp_path / "m"))


def test_a_damaged_record_is_an_error(tmp_path):
    (filled(tmp_path / "m") / RECORD).write_text("{")
    with pytest.raises(ConfigError, match=r"is damaged .*; remove the folder"):
        is_there(item(tmp_path / "m"))


def test_a_run_says_what_is_missing_and_how_to_get_it(tmp_path):
    here = filled(tmp_path / "here")
    items = [
        {"path": str(here), "kind": "model", "hub": "org/name"},
        {"path": "models/a", "kind": "model", "maker": "llama"},
        {"path": "data/b", "kind": "dataset", "hub": "org/b"},
    ]
    with pytest.raises(
        ConfigError, match=r"needs models/a \(model\), data/b \(dataset\), not there yet; .*data prepare"
    ):
        check_prepared(recipe(*items))
    check_prepared(recipe(items[0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "m", "kind": "model"}, "exactly one of hub, maker, manual, trl_sft"),
        ({"path": "m", "kind": "model", "hub": "a/b", "maker": "llama"}, "exactly one of hub, maker, manual, trl_sft"),
        ({"path": "m", "kind": "model", "maker": "llama", "revision": "v1"}, "revision belongs to a download"),
        ({"path": "d", "kind": "dataset", "hub": "a/b", "tokenizer": "a/c"}, "a data set has no tokenizer"),
        ({"path": "d", "kind": "dataset", "hub": "https://x/y"}, "String should match pattern"),
    ],
)
def test_an_item_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        recipe(fields)


def test_the_record_is_no_file_of_the_model(tmp_path):
    """Files are published with a model's weights by their suffix; the record must not be among them."""
    assert not Path(RECORD).suffix
    write_record(item(filled(tmp_path / "m")), commit=None)
    assert json.loads((tmp_path / "m" / RECORD).read_text())["origin"]["hub"] == "org/name"


# ---- Models that are trained before a run ---------------------------------------------------------------------------


def trained(**changes: object) -> dict[str, object]:
    fields = {"base": "models/base", "dataset": "data/d", "prompt": "{q}", "response": "{a}", "num_steps": 2}
    return {**fields, **changes}


def chain(**changes: object) -> Recipe:
    """A starting model made of a model that is made of a base; a judge of its own base."""
    part = {"task": "t", "texts": ["x"]}
    document = {
        "run": {"name": "r"},
        "model": {"path": "models/policy"},
        "data": {"train": part, "heldout": part},
        "prepare": [
            {"path": "models/base", "kind": "model", "maker": "llama"},
            {"path": "data/d", "kind": "dataset", "maker": "gsm8k_data"},
            {"path": "models/unused", "kind": "model", "maker": "llama"},
        ],
        "sft": [trained(path="models/middle"), trained(base="models/middle", at_start=True)],
        **changes,
    }
    return parse_recipe(document, where="test")


def made(path: str, section: SftSection) -> None:
    """What the trainer leaves."""
    folder = Path(path)
    folder.mkdir(parents=True)
    (folder / REPORT_FILE).write_text(json.dumps({"settings": section.deciding(), "examples_sha256": "ab"}))


def test_what_only_serves_to_make_a_model_is_needed_until_the_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = chain()
    assert list(wanted.supervised) == ["models/middle", "models/policy"]
    assert training_inputs(wanted) == {"models/base", "models/middle", "data/d"}

    found = needed(wanted)
    assert list(found.to_train) == ["models/middle", "models/policy"], "in the order of the recipe"
    assert [item.path for item in found.prepare] == ["models/base", "data/d", "models/unused"]
    with pytest.raises(ConfigError, match=r"needs models/base \(model\), .*, models/middle \(model\), not there yet"):
        check_prepared(wanted, at_start=False)
    with pytest.raises(ConfigError, match=r"models/middle \(model\), models/policy \(model\), not there yet"):
        check_prepared(wanted)

    made("models/middle", wanted.sft[0])
    found = needed(wanted)
    assert list(found.to_train) == ["models/policy"]
    assert [item.path for item in found.prepare] == ["data/d", "models/unused"], "the base has served"

    made("models/policy", wanted.sft[1])
    assert not needed(wanted).to_train
    assert [item.path for item in needed(wanted).prepare] == ["models/unused"]
    (tmp_path / "models" / "middle" / REPORT_FILE).unlink()
    (tmp_path / "models" / "middle").rmdir()
    assert not needed(wanted).to_train, "nobody needs the middle any more"
    assert made_at_start(wanted) == {"models/policy"}


def test_a_folder_that_something_else_names_is_needed_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scorers = [{"kind": "reward_model", "model": "models/base"}]
    wanted = chain(reward={"tasks": {"t": {"scorers": scorers}}})
    for path, section in wanted.supervised.items():
        assert isinstance(section, SftSection)
        made(path, section)
    assert [item.path for item in needed(wanted).prepare] == ["models/base", "models/unused"]


def test_a_model_of_other_settings_is_refused_by_the_first_key_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = chain().sft[0]
    made("models/middle", section)
    assert is_trained("models/middle", section)
    elsewhere = section.model_copy(update={"base": "/other/place/base", "device": "cuda", "num_threads": 4})
    assert is_trained("models/middle", elsewhere), "where a folder lies and how it runs decides nothing"
    for changes, message in (
        ({"num_steps": 3, "seed": 1}, "was trained with num_steps = 2, and the recipe asks for 3; remove that folder"),
        ({"learning_rate": 1e-3}, r"was trained with learning_rate\.value = 0\.0001, and the recipe asks for 0\.001"),
        ({"base": "models/other"}, "was trained with base = 'base', and the recipe asks for 'other'"),
    ):
        other = SftSection.model_validate({**trained(path="models/middle"), **changes})
        with pytest.raises(ConfigError, match=message):
            is_trained("models/middle", other)


def test_a_model_without_a_report_belongs_to_a_person_and_a_damaged_report_is_an_error(tmp_path: Path) -> None:
    section = chain().sft[0]
    path = str(filled(tmp_path / "mine"))
    assert is_trained(path, section)
    (tmp_path / "mine" / REPORT_FILE).write_text('{"settings": {')
    with pytest.raises(ConfigError, match=r"supervised\.json of .*mine is damaged; remove the folder"):
        is_trained(path, section)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file, and must be a folder"):
        is_trained(str(tmp_path / "file"), section)


def test_a_report_of_a_release_without_a_key_has_its_default(tmp_path: Path) -> None:
    section = chain().sft[0]
    made(str(tmp_path / "m"), section)
    report = json.loads((tmp_path / "m" / REPORT_FILE).read_text())
    del report["settings"]["adam_beta1"]
    (tmp_path / "m" / REPORT_FILE).write_text(json.dumps(report))
    assert is_trained(str(tmp_path / "m"), section)
