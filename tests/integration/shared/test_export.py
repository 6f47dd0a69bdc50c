"""A published version becomes a folder that transformers and the real vLLM load: the same greedy tokens from both."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tba_trainer.loop.shutdown import upload_export
from tba_trainer.trainer import train
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import Recipe
from tba.errors import ConfigError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.weights.export import write_export
from tba_cli.commands.export import Exportable, choose
from tba_cli.main import main
from tba_cli.run_folder import RunFolder
from tests.support.exports import BEST, make_facts, published, transformers_greedy
from tests.support.history_values import history, run_info
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import RecordedBuffer, make_recipe
from tests.support.vllm_greedy import TIMEOUT_S, vllm_greedy, why_not

PROMPTS, NUM_TOKENS = ["47+85=", "1+1=", "9"], 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: untied and tied heads."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(folder / name, seed, tied=name == "tied", hidden_size=128)
        for seed, name in enumerate(("untied", "tied"))
    }


def publish_files(versions: WeightVersions, model: Path, tensors: list[Path], *, dtype: Any) -> None:
    """Publish version 1-1 with these tensors and the other files of the model."""
    manifest = versions.manifest(START)
    versions.publish(
        version=PolicyVersion(1, 1),
        parent=START,
        dtype=dtype,
        tensors_paths=tensors,
        files={stored.name: model / stored.name for stored in manifest.files},
        canary=manifest.canary,
        torch_version="2",
        transformers_version="5",
    )


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_transformers_and_vllm_generate_the_same_from_an_export_tied_or_not(
    models: dict[str, Path], tmp_path: Path
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    _, versions, recipe = published(tmp_path, {"0-0": models["untied"], "1-4": models["tied"]})
    folders = []
    for version in (START, PolicyVersion(1, 4)):
        folders.append(tmp_path / f"export-{version}")
        write_export(versions, version, folders[-1], make_facts(recipe))
    by_vllm = vllm_greedy(folders, PROMPTS, num_tokens=NUM_TOKENS, cache=tmp_path / "cache")
    by_transformers = [transformers_greedy(folder, PROMPTS, num_tokens=NUM_TOKENS) for folder in folders]
    assert by_vllm == by_transformers
    assert by_vllm[0] != by_vllm[1]
    originals = [transformers_greedy(models[name], PROMPTS, num_tokens=NUM_TOKENS) for name in ("untied", "tied")]
    assert by_transformers == originals


def test_an_export_holds_the_published_parameters_in_their_dtype_and_a_card(
    models: dict[str, Path], tmp_path: Path
) -> None:
    store, versions, recipe = published(tmp_path, {"0-0": models["tied"]})
    half = {name: tensor.bfloat16() for name, tensor in load_file(models["tied"] / "model.safetensors").items()}
    save_file(half, tmp_path / "model.safetensors")
    publish_files(versions, models["tied"], [tmp_path / "model.safetensors"], dtype="bfloat16")
    write_export(versions, PolicyVersion(1, 1), tmp_path / "export", make_facts(recipe))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(parameter, half[name]) for name, parameter in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("1+1")["input_ids"] == [4, 13, 4]
    assert "# demo, version 1-1" in (tmp_path / "export" / "README.md").read_text()
    assert store.list("runs/demo/export/") == []


@pytest.mark.parametrize("num_files", [1, 3])
def test_every_expert_of_an_export_has_the_tensors_that_older_tools_look_for(tmp_path: Path, num_files: int) -> None:
    """Those of `save_pretrained`, although a version has the fused ones; and transformers loads the same again."""
    made = make_tiny_model(tmp_path / "model", architecture="qwen3_moe", hidden_size=32)
    expected = load_file(made / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(made)
    fused = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    names = [f"model-{number:05d}-of-00003" for number in (1, 2, 3)] if num_files == 3 else ["model"]
    paths = [tmp_path / f"{name}.safetensors" for name in names]
    for number, path in enumerate(paths):
        save_file({name: fused[name] for name in sorted(fused)[number::num_files]}, path, {"format": "pt"})
    _, versions, recipe = published(tmp_path, {"0-0": made})
    publish_files(versions, made, paths, dtype="float32")
    write_export(versions, PolicyVersion(1, 1), tmp_path / "export", make_facts(recipe))
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(files) == num_files
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    if num_files > 1:
        index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: path.name for path in files for name in load_file(path)}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(parameter, fused[name]) for name, parameter in again.named_parameters())


def test_the_trainer_uploads_the_last_version_with_its_card_and_leaves_nothing_older(
    models: dict[str, Path], tmp_path: Path
) -> None:
    store, _, recipe = published(tmp_path, {"1-4": models["tied"], "1-8": models["untied"]})
    store.put("runs/demo/export/model-00001-of-00002.safetensors", b"of an earlier export")
    info = run_info(step=8, evals=list(make_facts(recipe).evals), best=BEST)
    prefix = upload_export(recipe, info, store, last=PolicyVersion(1, 8))
    names = {key.removeprefix(prefix) for key in store.list(prefix)}
    assert names == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert "# demo, version 1-8" in store.get(prefix + "README.md").decode()
    store.get_file(prefix + "model.safetensors", tmp_path / "found.safetensors")
    found, expected = load_file(tmp_path / "found.safetensors"), load_file(models["untied"] / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_trainer_keeps_the_best_version_and_exports_the_last_at_the_end(
    models: dict[str, Path], tmp_path: Path
) -> None:
    store, buffer, section = FileStore(tmp_path / "store"), RecordedBuffer(), {"num_steps": 12, "sync_interval": 2}
    recipe = make_recipe(models["tied"], trainer={**section, "keep_versions": 2})
    buffer.best = BEST
    train(recipe, buffer=buffer, store=store, stop=threading.Event())  # pyright: ignore[reportArgumentType]
    versions = WeightVersions(store, "demo")
    assert [str(version) for version in versions.versions()] == ["0-0", "1-4", "1-10", "1-12"]
    card = store.get("runs/demo/export/README.md").decode()
    assert "# demo, version 1-12" in card


@pytest.fixture
def ended(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a finished local run with two versions."""
    monkeypatch.chdir(tmp_path)
    _, _, recipe = published(tmp_path, {"1-4": models["tied"], "1-8": models["untied"]})
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.path.mkdir(parents=True)
    for path in (folder.recipe_path, folder.config_path):
        path.write_text(recipe.model_dump_json())
    facts = make_facts(recipe)
    ended = history(evals=list(facts.evals), best=BEST)
    folder.history_path.write_text(ended.model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("words", "version"), [([], "1-8"), (["--version", "best"], "1-4"), (["--version", "1-4"], "1-4")]
)
def test_tba_export_writes_any_version_of_an_ended_run(ended: RunFolder, words: list[str], version: str) -> None:
    assert main(["export", "demo", *words, "--out", "here"]) == 0
    assert f"# demo, version {version}" in Path("here/README.md").read_text()
    assert json.loads(Path("here/config.json").read_text())["dtype"] == "float32"
    AutoModelForCausalLM.from_pretrained("here")
    assert {path.name for path in Path().iterdir()} == {"here", "runs", "store"}


def test_a_place_that_cannot_be_made_is_one_sentence(
    ended: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["export", "--run-dir", str(ended.path), "--out", "file/x"]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_best_version_that_is_gone_is_said_in_a_sentence(
    ended: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = history(best=BEST.model_copy(update={"version": "1-2"}))
    ended.history_path.write_text(gone.model_dump_json())
    assert main(["export", "demo", "--version", "best", "--out", "here"]) == 2
    assert "run 'demo' has no weight version best (any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "demo", "--version", "7-7", "--out", "here"], "no weight version 7-7"),
        (["export", "demo", "--version", "start", "--out", "here"], "no weight version start (any more"),
        (["export", "demo", "--version", "newest", "--out", "here"], "'newest' names no version of run 'demo';"),
        (["export", "demo", "--version", "40", "--out", "here"], "give LINEAGE-STEP, start, best or last; the newest"),
        (["export", "other", "--out", "here"], "there is no run"),
        (["export", "demo", "--out", "runs"], "exists already"),
        (["export", "--url", "http://127.0.0.1:1", "--out", "here"], "--recipe"),
    ],
)
def test_tba_export_says_in_a_sentence_what_it_cannot_do(
    ended: RunFolder, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("here").exists()


def test_the_start_of_a_fork_is_its_first_version(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, versions, recipe = published(tmp_path, {"3-40": models["tied"], "3-48": models["untied"]})
    document = recipe.model_dump()
    document["run"] |= {"snapshot": "old/end", "fork_version": "1-40"}
    fork = Exportable(facts=make_facts(Recipe.model_validate(document)))
    assert choose("start", fork) == PolicyVersion(3, 40)
    versions.delete(PolicyVersion(3, 40))
    with pytest.raises(ConfigError, match=r"no weight version start .* the newest are 3-48"):
        choose("start", fork)


def test_a_run_that_ended_without_a_history_is_exported_without_results(
    ended: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    ended.history_path.unlink()
    assert main(["export", "demo", "--out", "here"]) == 0
    assert "No evaluation of this run is known." in Path("here/README.md").read_text()
    assert main(["export", "demo", "--version", "best", "--out", "there"]) == 2
    assert "no best version" in capsys.readouterr().err
