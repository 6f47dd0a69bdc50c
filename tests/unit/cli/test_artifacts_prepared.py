"""Folders that a run needs: there or not, whole or not, and what the recipe asks for or something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tba.config import Recipe, parse_recipe
from tba.config.data import PrepareItem
from tba.errors import ConfigError
from tba_cli.artifacts.prepared import (
    RECORD,
    begin,
    check_prepared,
    is_there,
    publish,
    read_record,
)


def item(folder: Path, **changes: object) -> PrepareItem:
    return PrepareItem.model_validate({"path": str(folder), "kind": "model", "hub": "org/name", **changes})


def recipe(*items: Mapping[str, object]) -> Recipe:
    part = {"task": "t", "texts": ["x"]}
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"sets": [part]}}
    return parse_recipe({**document, "prepare": list(items)}, where="test")


def filled(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def made(wanted: PrepareItem, commit: str | None = "c0ffee") -> None:
    publish(wanted, filled(begin(wanted)), commit=commit)


def test_a_folder_is_there_once_it_is_whole(tmp_path):
    wanted = item(tmp_path / "m")
    assert not is_there(wanted)
    (tmp_path / "m").mkdir()
    assert not is_there(wanted), "it is empty"
    made(wanted)
    assert is_there(wanted)
    assert read_record(tmp_path / "m") == {"origin": wanted.origin, "commit": "c0ffee"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_that_another_process_made_meanwhile_is_not_replaced(tmp_path):
    filled(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"cannot become .*/m \(Directory not empty\); run this command again"):
        made(item(tmp_path / "m"))
    assert (tmp_path / "m" / "config.json").is_file()


def test_a_folder_of_a_persons_own_is_taken_as_it_is(tmp_path):
    assert is_there(item(filled(tmp_path / "m")))


def test_a_folder_with_something_else_is_not_overwritten(tmp_path):
    made(item(tmp_path / "m"))
    for other in (item(tmp_path / "m", hub="org/other"), item(tmp_path / "m", revision="v2")):
        with pytest.raises(ConfigError, match=r"holds hub org/name, and the recipe asks for hub org/.*; remove that"):
            is_there(other)


def test_half_of_one_thing_is_not_completed_with_another(tmp_path):
    half = filled(begin(item(tmp_path / "m")))
    assert begin(item(tmp_path / "m")) == half, "it continues where it stopped"
    assert (half / "config.json").is_file()
    neighbour = begin(item(tmp_path / "m.12345678"))
    for changes in ({"hub": "org/x"}, {"revision": "v2"}):
        other = begin(item(tmp_path / "m", **changes))
        assert set(tmp_path.iterdir()) == {other, neighbour}
        assert not list(other.iterdir())


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
        {"path": "models/a", "kind": "model", "hub": "org/base"},
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
        ({"path": "m", "kind": "model"}, "exactly one of hub, manual, trl_sft"),
        ({"path": "m", "kind": "model", "hub": "a/b", "manual": "ask Ana"}, "exactly one of hub, manual, trl_sft"),
        ({"path": "m", "kind": "model", "manual": "ask Ana", "revision": "v1"}, "revision belongs to a download"),
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
    made(item(tmp_path / "m"), commit=None)
    assert json.loads((tmp_path / "m" / RECORD).read_text())["origin"]["hub"] == "org/name"
