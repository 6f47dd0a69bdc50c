"""The folders of a recipe that each service needs, and their names in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, MalformedError
from tba_cli.artifacts import required_folders
from tba_cli.artifacts.manifest import FolderFile, FolderManifest, decode_folder_manifest, folder_digest
from tba_cli.artifacts.required import is_hub_name, name_of
from tests.support.buffer import make_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def names(recipe: Recipe, service: str | None) -> set[str]:
    return {folder.name for folder in required_folders(recipe, service)}  # pyright: ignore[reportArgumentType]


def test_the_quickstart_needs_its_model_in_the_trainer_alone():
    recipe = load_recipe(RECIPES / "quickstart.toml", environ={})
    assert names(recipe, "trainer") == {"quickstart-0"}
    assert names(recipe, "searcher") == names(recipe, "reward") == names(recipe, "setup") == set()


def test_red_teaming_needs_other_models_in_other_services():
    recipe = load_recipe(RECIPES / "redteam.toml", environ={})
    assert names(recipe, "trainer") == {"gpt2-sft-redteam"}
    assert names(recipe, "reward") == {"gpt2-alpaca", "roberta-hate-speech"}
    assert names(recipe, "searcher") == {"all-MiniLM-L6-v2"}
    assert names(recipe, None) == {"gpt2-sft-redteam", "gpt2-alpaca", "roberta-hate-speech", "all-MiniLM-L6-v2"}
    assert names(recipe, "setup") == set()


def test_data_sets_are_read_by_setup():
    recipe = load_recipe(RECIPES / "math.toml", environ={})
    assert [(folder.kind, folder.name) for folder in required_folders(recipe, "setup")] == [
        ("dataset", "hendrycks-math"),
        ("dataset", "math-500"),
    ]


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


def test_what_the_hub_has_is_left_to_the_reward_service():
    scorers = [{"kind": "reward_model", "model": "some-org/reward-model"}]
    recipe = make_recipe(reward={"tasks": {"judged": {"scorers": scorers}}})
    assert required_folders(recipe, "reward") == []
    assert is_hub_name("some-org/model")
    assert is_hub_name("gpt2")
    assert not any(map(is_hub_name, ("models/reward", "/app/x", "./x", "a/b/c", "~/x")))


def test_a_prepared_model_is_a_folder_even_if_its_path_could_be_a_name_of_the_hub():
    recipe = make_recipe(
        reward={"tasks": {"judged": {"scorers": [{"kind": "reward_model", "model": "own/reward"}]}}},
    )
    item = {"path": "own/reward", "kind": "model", "hub": "some-org/reward"}
    document = recipe.model_dump(mode="json")
    document["prepare"] = [item]
    prepared = Recipe.model_validate(document)
    assert [folder.path for folder in required_folders(prepared, "reward")] == ["own/reward"]


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
