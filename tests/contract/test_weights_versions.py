"""Weight versions in both stores: invisible until whole, immutable, verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from structlog.testing import capture_logs

from tba.errors import DigestError, MalformedError, ObjectExistsError, ObjectNotFoundError
from tba.store import ObjectStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions, params_sha256_of_files, repository, sha256_of_file
from tba.wire import Manifest
from tba.wire.weight_manifest import MAX_MANIFEST_BYTES
from tests.support.weight_chain import CANARY, flip, publish_files

V1 = PolicyVersion(1, 4)


class Model:
    """The files of a small model in a folder, and the versions of run `demo` in a store."""

    def __init__(self, store: ObjectStore, versions: WeightVersions, folder: Path, *, seed: int = 0) -> None:
        self.store, self.versions = store, versions
        folder.mkdir(parents=True)
        rng = np.random.default_rng(seed)
        self.tensors = folder / "model.safetensors"
        save_file({"b": rng.random((3, 4), np.float32), "a": rng.random(5).astype(np.float16)}, self.tensors)
        self.files = {name: folder / name for name in ("config.json", "tokenizer.json")}
        for name, path in self.files.items():
            path.write_text(f'{{"name": "{name}"}}')

    def publish(self, version: PolicyVersion = V1, **changes: object) -> Manifest:
        given: dict[str, Any] = {"tensors_paths": [self.tensors], "files": self.files, **changes}
        return publish_files(self.versions, version, **given)


@pytest.fixture
def model(store: ObjectStore, tmp_path: Path) -> Model:
    return Model(store, WeightVersions(store, "demo"), tmp_path / "model")


def test_a_published_version_comes_back_byte_for_byte(model: Model, tmp_path: Path) -> None:
    published = model.publish()
    folder = tmp_path / "pulled"
    assert model.versions.download_model(V1, folder).manifest == published
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    for name, path in {"model.safetensors": model.tensors, **model.files}.items():
        assert (folder / name).read_bytes() == path.read_bytes()
    assert params_sha256_of_files([folder / "model.safetensors"]) == published.params_sha256
    assert (published.canary, published.version, published.parent, published.run) == (CANARY, "1-4", "0-0", "demo")


def test_keys_are_the_ones_that_the_design_names(model: Model) -> None:
    manifest = model.publish()
    digests = {file.name: file.sha256 for file in manifest.files}
    of_files = [f"runs/demo/files/{digest}/{name}" for name, digest in digests.items()]
    of_version = [f"runs/demo/weights/1-4/{name}" for name in ("manifest.json", "model.safetensors")]
    assert model.store.list("") == sorted(of_files + of_version)
    assert digests["config.json"] == manifest.model_config_sha256 == sha256_of_file(model.files["config.json"])


def test_the_tokenizer_digest_follows_the_tokenizer_and_not_the_model(model: Model) -> None:
    first = model.publish(PolicyVersion(1, 1))
    model.files["config.json"].write_text("{}")
    second = model.publish(PolicyVersion(1, 2))
    model.files["tokenizer.json"].write_text("{}")
    third = model.publish(PolicyVersion(1, 3))
    assert first.tokenizer_sha256 == second.tokenizer_sha256 != third.tokenizer_sha256
    assert first.model_config_sha256 != second.model_config_sha256 == third.model_config_sha256


def test_the_manifest_is_written_last(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    put, put_file = model.store.put, model.store.put_file
    monkeypatch.setattr(model.store, "put", lambda key, *a, **k: (order.append(key), put(key, *a, **k)))
    monkeypatch.setattr(model.store, "put_file", lambda key, *a, **k: (order.append(key), put_file(key, *a, **k)))
    model.publish()
    assert order[-1] == "runs/demo/weights/1-4/manifest.json"
    assert len(order) == 4


def test_a_half_written_version_with_other_tensors_is_not_mixed_with_mine(model: Model, tmp_path: Path) -> None:
    Model(model.store, model.versions, tmp_path / "other", seed=1).publish()
    model.store.delete("runs/demo/weights/1-4/manifest.json")
    with pytest.raises(ObjectExistsError, match=r"model\.safetensors .* holds other tensors"):
        model.publish()
    assert not model.versions.exists(V1)


def test_the_same_content_may_be_published_again_and_the_first_manifest_stays(model: Model) -> None:
    first = model.publish()
    again = model.publish(canary=CANARY.model_copy(update={"logprobs": [-0.5001, -1.25]}))
    assert again == first == model.versions.manifest(V1)


@pytest.mark.parametrize(
    ("seed", "changes", "field"),
    [(1, {}, "params_sha256"), (0, {"parent": None}, "parent"), (0, {"dtype": "float16"}, "dtype")],
)
def test_other_content_under_a_taken_version_is_refused(
    model: Model, tmp_path: Path, seed: int, changes: dict[str, Any], field: str
) -> None:
    first = model.publish()
    other = Model(model.store, model.versions, tmp_path / "other", seed=seed)
    with pytest.raises(ObjectExistsError, match=f"exists with other content .*{field}"):
        other.publish(**changes)
    assert model.versions.manifest(V1) == first
    pulled = model.versions.download_model(V1, tmp_path / "pulled")
    assert pulled.manifest == first, "the objects of the first are untouched"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_object_is_named_and_nothing_is_left_in_the_folder(model: Model, tmp_path: Path, name: str) -> None:
    manifest = model.publish()
    damaged = next(item for item in [*manifest.full, *manifest.files] if item.name == name)
    flip(model.store, damaged.key)
    folder = tmp_path / "pulled"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"old")
    with pytest.raises(DigestError, match=damaged.key):
        model.versions.download_model(V1, folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"old"


def test_one_file_of_a_version_is_read_and_verified(model: Model) -> None:
    with pytest.raises(ObjectNotFoundError, match="weight version 1-4 of run demo does not exist"):
        model.versions.read_file(V1, "tokenizer.json")
    manifest = model.publish()
    assert model.versions.read_file(V1, "tokenizer.json") == model.files["tokenizer.json"].read_bytes()
    assert model.versions.read_file(V1, "merges.txt") is None
    stored = next(file for file in manifest.files if file.name == "tokenizer.json")
    flipped = flip(model.store, stored.key)
    for damaged in (flipped, flipped + b" "):
        model.store.put(stored.key, damaged)
        with pytest.raises(DigestError, match=stored.key):
            model.versions.read_file(V1, "tokenizer.json")


def test_a_manifest_or_an_object_of_another_size_is_refused_before_it_is_read(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = model.publish()
    sizes = {manifest.full[0].key: 10**15}

    def read(*_: object) -> bytes:
        raise AssertionError("it is read, whatever its size")

    with monkeypatch.context() as patch:
        patch.setattr(model.store, "size_bytes", lambda key: sizes.get(key))
        patch.setattr(model.store, "get_file", read)
        with pytest.raises(DigestError, match=r"damaged: 1000000000000000 bytes, the manifest says"):
            model.versions.download_tensors(V1, tmp_path / "pulled")
        sizes["runs/demo/weights/1-4/manifest.json"] = MAX_MANIFEST_BYTES + 1
        patch.setattr(model.store, "get", read)
        with pytest.raises(MalformedError, match="the limit of a manifest is"):
            model.versions.manifest(V1)
    assert model.versions.manifest(V1) == manifest


def test_a_version_in_several_files_has_the_digest_of_its_tensors_and_an_index(model: Model, tmp_path: Path) -> None:
    whole = model.publish()
    paths = [tmp_path / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for path, (name, tensor) in zip(paths, load_file(model.tensors).items(), strict=True):
        save_file({name: tensor}, path)
    split = model.publish(PolicyVersion(1, 8), tensors_paths=paths)
    assert split.params_sha256 == whole.params_sha256
    assert [item.key for item in split.full] == [f"runs/demo/weights/1-8/{path.name}" for path in paths]
    pulled = model.versions.download_tensors(PolicyVersion(1, 8), tmp_path / "pulled").paths
    assert [path.read_bytes() for path in pulled] == [path.read_bytes() for path in paths]
    model.versions.download_model(PolicyVersion(1, 8), tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: path.name for path in paths for name in load_file(path)}
    model.versions.delete(PolicyVersion(1, 8))
    assert not [key for key in model.store.list("") if "1-8" in key]


def test_a_tensor_in_two_files_of_one_version_is_refused(model: Model, tmp_path: Path) -> None:
    twice = shutil.copyfile(model.tensors, tmp_path / "twice.safetensors")
    with pytest.raises(MalformedError, match=r"tensor '[ab]' is in .*twice\.safetensors and in another file"):
        model.publish(tensors_paths=[model.tensors, twice])
    assert model.store.list("") == []


def test_versions_are_sorted_as_numbers_and_runs_do_not_mix(model: Model, tmp_path: Path) -> None:
    wanted = [START, PolicyVersion(1, 9), PolicyVersion(1, 10), PolicyVersion(2, 4)]
    for version in reversed(wanted):
        model.publish(version, parent=None)
    Model(model.store, WeightVersions(model.store, "demo2"), tmp_path / "demo2").publish(PolicyVersion(7, 7))
    model.store.put("runs/demo/weights/notes/manifest.json", b"{}")
    repository._note_foreign.cache_clear()
    with capture_logs() as lines:
        assert model.versions.versions() == model.versions.versions() == wanted
    assert [line["folder"] for line in lines] == ["runs/demo/weights/notes"]


def test_a_manifest_of_another_version_is_not_believed(model: Model) -> None:
    model.publish()
    model.store.put("runs/demo/weights/1-5/manifest.json", model.store.get("runs/demo/weights/1-4/manifest.json"))
    with pytest.raises(MalformedError, match="is the manifest of version 1-4 of run demo"):
        model.versions.manifest(PolicyVersion(1, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {}}, r"hold no config\.json"),
        ({"dtype": "int8"}, "dtype: Input should be"),
        ({"tensors_paths": [Path(__file__)]}, "is not a whole safetensors file"),
    ],
)
def test_what_can_be_no_version_is_refused_and_nothing_is_written(model: Model, changes: Any, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        model.publish(**changes)
    assert model.store.list("") == []


def test_only_what_has_no_manifest_and_is_of_an_older_lineage_is_deleted(model: Model) -> None:
    model.publish()
    halves = [f"runs/demo/weights/{name}/model.safetensors" for name in ("0-0", "1-8", "2-8", "3-8", "notes")]
    for key in halves:
        model.store.put(key, b"half")
    before = set(model.store.list(""))
    deleted = model.versions.delete_incomplete(before_lineage=3, keep={START})
    assert deleted == [PolicyVersion(1, 8), PolicyVersion(2, 8)]
    assert (before - set(model.store.list("")), model.versions.versions()) == (set(halves[1:3]), [V1])
