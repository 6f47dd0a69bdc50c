"""The folders of a recipe: who needs them, their names in the store, and whether they are there and whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tba.config import Recipe, load_recipe, parse_recipe
from tba.config.data import PrepareItem
from tba.errors import ConfigError, MalformedError
from tba_cli.artifacts import required_folders
from tba_cli.artifacts.manifest import FolderFile, FolderManifest, decode_folder_manifest, folder_digest
from tba_cli.artifacts.prepared import RECORD, begin, check_prepared, is_there, publish, read_record
from tba_cli.artifacts.required import is_hub_name, name_of
from tests.support.buffer import make_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
A_MODEL = {"path": "m", "kind": "model"}


@pytest.mark.parametrize(
    ("recipe", "service", "names"),
    [
        ("quickstart", "trainer", {"quickstart-0"}),
        *(("quickstart", service, set()) for service in ("searcher", "reward", "setup")),
        ("redteam", "trainer", {"gpt2-sft-redteam"}),
        ("redteam", "reward", {"gpt2-alpaca", "roberta-hate-speech"}),
        ("redteam", "searcher", {"all-MiniLM-L6-v2"}),
        ("redteam", "setup", set()),
        ("redteam", None, {"gpt2-sft-redteam", "gpt2-alpaca", "roberta-hate-speech", "all-MiniLM-L6-v2"}),
        ("math", "setup", {"hendrycks-math", "math-500"}),
    ],
)
def test_a_service_needs_the_folders_that_it_reads(recipe, service, names):
    found = required_folders(load_recipe(RECIPES / f"{recipe}.toml", environ={}), service)
    assert {folder.name for folder in found} == names


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_has_names_that_a_store_can_hold(path: Path):
    assert all(folder.name for folder in required_folders(load_recipe(path, environ={})))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/tiny/llama", "tiny/llama"),
        ("/app/models/Qwen2.5-7B", "Qwen2.5-7B"),
        ("/mnt/models/old/models/x", "x"),
        ("/srv/checkpoints/mine", "mine"),
        ("./mine", "mine"),
        ("models", "models"),
    ],
)
def test_a_name_is_what_follows_models(path: str, name: str):
    assert name_of(path, "model") == name


@pytest.mark.parametrize("path", ["models/with space", "models/files", "models/a/files/b", "models/" + "x" * 300])
def test_a_name_that_no_store_can_hold_is_refused(path: str):
    with pytest.raises(ConfigError, match="cannot be kept in the store under the name"):
        name_of(path, "model")


def test_two_folders_with_one_name_are_refused():
    scorers = [{"kind": "reward_model", "model": "/elsewhere/none"}]
    recipe = make_recipe(reward={"tasks": {"judged": {"scorers": scorers}}})
    with pytest.raises(ConfigError, match="/elsewhere/none and models/none are both called 'none'"):
        required_folders(recipe)


def test_what_the_hub_has_is_left_to_the_reward_service_unless_the_recipe_prepares_it():
    scorers = [{"kind": "reward_model", "model": "own/reward"}]
    document = make_recipe(reward={"tasks": {"judged": {"scorers": scorers}}}).model_dump(mode="json")
    assert required_folders(Recipe.model_validate(document), "reward") == []
    document["prepare"] = [{"path": "own/reward", "kind": "model", "hub": "some-org/reward"}]
    (folder,) = required_folders(Recipe.model_validate(document), "reward")
    assert folder.path == "own/reward"
    assert is_hub_name("some-org/model")
    assert is_hub_name("gpt2")
    assert not any(map(is_hub_name, ("models/reward", "/app/x", "./x", "a/b/c", "~/x")))


def manifest_with(path: str) -> bytes:
    files = [FolderFile.model_construct(path=path, size_bytes=1, sha256="0" * 64)]
    manifest = FolderManifest.model_construct(
        schema_version=1, kind="model", name="x", digest=folder_digest(files), files=files, created_at_s=1.0,
        tba_version="0",
    )  # fmt: skip
    return manifest.model_dump_json().encode()


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "a//b", ".", "a\\b"])
def test_a_manifest_cannot_name_a_file_outside_its_folder(path: str):
    with pytest.raises(MalformedError, match="not a path inside a folder"):
        decode_folder_manifest(manifest_with(path), where="models/x/manifest.json")


def test_a_manifest_whose_files_were_edited_is_refused():
    good = manifest_with("config.json")
    assert decode_folder_manifest(good, where="here").name == "x"
    with pytest.raises(MalformedError, match="its digest does not match its files"):
        decode_folder_manifest(good.replace(b"config.json", b"konfig.json"), where="here")


def item(folder: Path, **changes: object) -> PrepareItem:
    return PrepareItem.model_validate({"path": str(folder), "kind": "model", "hub": "org/name", **changes})


def recipe(*items: Mapping[str, object]) -> Recipe:
    sections = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"sets": [{"task": "t", "texts": ["x"]}]}}
    return parse_recipe({**sections, "prepare": list(items)}, where="test")


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
    assert not Path(RECORD).suffix, "it would be published with the weights, as files of a model are by their suffix"


def test_a_folder_that_another_process_made_meanwhile_is_not_replaced(tmp_path):
    filled(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"cannot become .*/m \(Directory not empty\); run this command again"):
        made(item(tmp_path / "m"))
    assert (tmp_path / "m" / "config.json").is_file()


def test_a_folder_with_something_else_is_not_overwritten(tmp_path):
    made(item(tmp_path / "m"))
    for other in (item(tmp_path / "m", hub="org/other"), item(tmp_path / "m", revision="v2")):
        with pytest.raises(ConfigError, match=r"holds hub org/name, and the recipe asks for hub org/.*; remove that"):
            is_there(other)


def test_a_model_of_a_gguf_file_stays_what_it_is_when_the_file_is_gone(tmp_path):
    weights = bytes(3 * 2**20)
    (tmp_path / "a.gguf").write_bytes(weights)
    wanted = item(tmp_path / "m", hub=None, gguf=str(tmp_path / "a.gguf"))
    made(wanted, commit=None)
    for other in (b"m" + weights[1:], weights[1:] + b"w", weights[1:]):
        (tmp_path / "a.gguf").write_bytes(other)
        with pytest.raises(ConfigError, match=r"holds gguf a\.gguf, ends_sha256"):
            is_there(wanted)
    (tmp_path / "a.gguf").unlink()
    assert is_there(wanted)


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
    paths = {str(here): "model", "models/a": "model", "data/b": "dataset"}
    items = [{"path": path, "kind": kind, "hub": "org/name"} for path, kind in paths.items()]
    missing = r"needs models/a \(model\), data/b \(dataset\), not there yet; .*data prepare"
    with pytest.raises(ConfigError, match=missing):
        check_prepared(recipe(*items))
    check_prepared(recipe(items[0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (A_MODEL, "exactly one of hub, manual, trl_sft"),
        ({**A_MODEL, "hub": "a/b", "manual": "ask Ana"}, "exactly one of hub, manual, trl_sft"),
        ({**A_MODEL, "manual": "ask Ana", "revision": "v1"}, "revision belongs to a download"),
        ({"path": "d", "kind": "dataset", "hub": "a/b", "tokenizer": "a/c"}, "a data set has no tokenizer"),
        ({"path": "d", "kind": "dataset", "hub": "https://x/y"}, "String should match pattern"),
        ({"path": "p", "kind": "dataset", "trl_sft": "a.yaml"}, "TRL makes models; set kind to 'model'"),
        ({**A_MODEL, "trl_sft": "a.yaml", "trl_reward": "b.yaml"}, "exactly one of hub, .* trl_reward"),
        ({**A_MODEL, "gguf": "a.gguf", "package": "a>=1"}, "String should match pattern"),
        ({**A_MODEL, "gguf": "a.gguf", "hub": "a/b", "tokenizer": "a/c"}, "gguf takes no tokenizer"),
    ],
)
def test_an_item_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        recipe(fields)
