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


class Model:
    """The files of a small model in a folder."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        folder.mkdir(parents=True)
        rng = np.random.default_rng(seed)
        self.tensors = folder / "model.safetensors"
        save_file({"b": rng.random((3, 4), np.float32), "a": rng.random(5).astype(np.float16)}, self.tensors)
        self.files = {name: folder / name for name in ("config.json", "tokenizer.json")}
        for name, path in self.files.items():
            path.write_text(f'{{"name": "{name}"}}')

    def publish(self, versions: WeightVersions, version: PolicyVersion, **changes: object) -> Manifest:
        given: dict[str, Any] = {"tensors_paths": [self.tensors], **changes}
        return publish_files(versions, version, files=given.pop("files", self.files), **given)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


V1 = PolicyVersion(1, 4)


def test_a_published_version_comes_back_byte_for_byte(store: ObjectStore, model: Model, tmp_path: Path) -> None:
    versions = WeightVersions(store, "demo")
    published = model.publish(versions, V1)
    pulled = versions.download_model(V1, tmp_path / "pulled").manifest
    assert pulled == published
    names = sorted(path.name for path in (tmp_path / "pulled").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    for name, path in {"model.safetensors": model.tensors, **model.files}.items():
        assert (tmp_path / "pulled" / name).read_bytes() == path.read_bytes()
    assert params_sha256_of_files([tmp_path / "pulled" / "model.safetensors"]) == published.params_sha256
    assert published.canary == CANARY
    assert (published.version, published.parent, published.run) == ("1-4", "0-0", "demo")


def test_keys_are_the_ones_that_the_design_names(store: ObjectStore, model: Model) -> None:
    manifest = model.publish(WeightVersions(store, "demo"), V1)
    digests = {file.name: file.sha256 for file in manifest.files}
    assert store.list("") == sorted(
        [
            "runs/demo/weights/1-4/manifest.json",
            "runs/demo/weights/1-4/model.safetensors",
            *(f"runs/demo/files/{digest}/{name}" for name, digest in digests.items()),
        ]
    )
    assert digests["config.json"] == manifest.model_config_sha256 == sha256_of_file(model.files["config.json"])


def test_the_tokenizer_digest_follows_the_tokenizer_and_not_the_model(store: ObjectStore, model: Model) -> None:
    versions = WeightVersions(store, "demo")
    first = model.publish(versions, PolicyVersion(1, 1))
    model.files["config.json"].write_text("{}")
    second = model.publish(versions, PolicyVersion(1, 2))
    model.files["tokenizer.json"].write_text("{}")
    third = model.publish(versions, PolicyVersion(1, 3))
    assert first.tokenizer_sha256 == second.tokenizer_sha256 != third.tokenizer_sha256
    assert first.model_config_sha256 != second.model_config_sha256 == third.model_config_sha256


def test_the_manifest_is_written_last(store: ObjectStore, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    put, put_file = store.put, store.put_file
    monkeypatch.setattr(store, "put", lambda key, *a, **k: (order.append(key), put(key, *a, **k)))
    monkeypatch.setattr(store, "put_file", lambda key, *a, **k: (order.append(key), put_file(key, *a, **k)))
    model.publish(WeightVersions(store, "demo"), V1)
    assert order[-1] == "runs/demo/weights/1-4/manifest.json"
    assert len(order) == 4


def test_a_half_written_version_with_other_tensors_is_not_mixed_with_mine(
    store: ObjectStore, model: Model, tmp_path: Path
) -> None:
    versions = WeightVersions(store, "demo")
    Model(tmp_path / "other", seed=1).publish(versions, V1)
    store.delete("runs/demo/weights/1-4/manifest.json")
    with pytest.raises(ObjectExistsError, match=r"model\.safetensors .* holds other tensors"):
        model.publish(versions, V1)
    assert not versions.exists(V1)


def test_the_same_content_may_be_published_again_and_the_first_manifest_stays(store: ObjectStore, model: Model) -> None:
    versions = WeightVersions(store, "demo")
    first = model.publish(versions, V1)
    again = model.publish(versions, V1, canary=CANARY.model_copy(update={"logprobs": [-0.5001, -1.25]}))
    assert again == first == versions.manifest(V1)


@pytest.mark.parametrize(
    ("seed", "changes", "field"),
    [(1, {}, "params_sha256"), (0, {"parent": None}, "parent"), (0, {"dtype": "float16"}, "dtype")],
)
def test_other_content_under_a_taken_version_is_refused(
    store: ObjectStore, model: Model, tmp_path: Path, seed: int, changes: dict[str, object], field: str
) -> None:
    versions = WeightVersions(store, "demo")
    first = model.publish(versions, V1)
    other = Model(tmp_path / "other", seed=seed)
    with pytest.raises(ObjectExistsError, match=f"exists with other content .*{field}"):
        other.publish(versions, V1, **changes)
    assert versions.manifest(V1) == first
    assert versions.download_model(V1, tmp_path / "pulled").manifest == first, "the objects of the first are untouched"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_object_is_named_and_nothing_is_left_in_the_folder(
    store: ObjectStore, model: Model, tmp_path: Path, name: str
) -> None:
    versions = WeightVersions(store, "demo")
    manifest = model.publish(versions, V1)
    damaged = next(item for item in [*manifest.full, *manifest.files] if item.name == name)
    flip(store, damaged.key)
    folder = tmp_path / "pulled"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"old")
    with pytest.raises(DigestError, match=damaged.key):
        versions.download_model(V1, folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"old"


def test_one_file_of_a_version_is_read_and_verified(store: ObjectStore, model: Model) -> None:
    versions = WeightVersions(store, "demo")
    with pytest.raises(ObjectNotFoundError, match="weight version 1-4 of run demo does not exist"):
        versions.read_file(V1, "tokenizer.json")
    manifest = model.publish(versions, V1)
    assert versions.read_file(V1, "tokenizer.json") == model.files["tokenizer.json"].read_bytes()
    assert versions.read_file(V1, "merges.txt") is None
    stored = next(file for file in manifest.files if file.name == "tokenizer.json")
    flipped = flip(store, stored.key)
    for damaged in (flipped, flipped + b" "):
        store.put(stored.key, damaged)
        with pytest.raises(DigestError, match=stored.key):
            versions.read_file(V1, "tokenizer.json")


def test_a_manifest_or_an_object_of_another_size_is_refused_before_it_is_read(
    store: ObjectStore, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = WeightVersions(store, "demo")
    manifest = model.publish(versions, V1)
    sizes = {manifest.full[0].key: 10**15}

    def read(*_: object) -> bytes:
        raise AssertionError("it is read, whatever its size")

    with monkeypatch.context() as patch:
        patch.setattr(store, "size_bytes", lambda key: sizes.get(key))
        patch.setattr(store, "get_file", read)
        with pytest.raises(DigestError, match=r"damaged: 1000000000000000 bytes, the manifest says"):
            versions.download_tensors(V1, tmp_path / "pulled")
        sizes["runs/demo/weights/1-4/manifest.json"] = MAX_MANIFEST_BYTES + 1
        patch.setattr(store, "get", read)
        with pytest.raises(MalformedError, match="the limit of a manifest is"):
            versions.manifest(V1)
    assert versions.manifest(V1) == manifest


def test_a_version_in_several_files_has_the_digest_of_its_tensors_and_comes_with_an_index(
    store: ObjectStore, model: Model, tmp_path: Path
) -> None:
    versions = WeightVersions(store, "demo")
    whole = model.publish(versions, V1)
    paths = [tmp_path / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for path, (name, tensor) in zip(paths, load_file(model.tensors).items(), strict=True):
        save_file({name: tensor}, path)
    split = model.publish(versions, PolicyVersion(1, 8), tensors_paths=paths)
    assert split.params_sha256 == whole.params_sha256
    assert [item.key for item in split.full] == [f"runs/demo/weights/1-8/{path.name}" for path in paths]
    pulled = versions.download_tensors(PolicyVersion(1, 8), tmp_path / "pulled").paths
    assert [path.read_bytes() for path in pulled] == [path.read_bytes() for path in paths]
    versions.download_model(PolicyVersion(1, 8), tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: path.name for path in paths for name in load_file(path)}
    versions.delete(PolicyVersion(1, 8))
    assert not [key for key in store.list("") if "1-8" in key]


def test_a_tensor_in_two_files_of_one_version_is_refused(store: ObjectStore, model: Model, tmp_path: Path) -> None:
    twice = shutil.copyfile(model.tensors, tmp_path / "twice.safetensors")
    with pytest.raises(MalformedError, match=r"tensor '[ab]' is in .*twice\.safetensors and in another file"):
        model.publish(WeightVersions(store, "demo"), V1, tensors_paths=[model.tensors, twice])
    assert store.list("") == []


def test_versions_are_sorted_as_numbers_and_runs_do_not_mix(store: ObjectStore, model: Model) -> None:
    versions = WeightVersions(store, "demo")
    wanted = [START, PolicyVersion(1, 9), PolicyVersion(1, 10), PolicyVersion(2, 4)]
    for version in reversed(wanted):
        model.publish(versions, version, parent=None)
    model.publish(WeightVersions(store, "demo2"), PolicyVersion(7, 7))
    store.put("runs/demo/weights/notes/manifest.json", b"{}")
    repository._note_foreign.cache_clear()
    with capture_logs() as lines:
        assert versions.versions() == versions.versions() == wanted
    assert [line["folder"] for line in lines] == ["runs/demo/weights/notes"]


def test_a_manifest_of_another_version_is_not_believed(store: ObjectStore, model: Model) -> None:
    versions = WeightVersions(store, "demo")
    model.publish(versions, V1)
    store.put("runs/demo/weights/1-5/manifest.json", store.get("runs/demo/weights/1-4/manifest.json"))
    with pytest.raises(MalformedError, match="is the manifest of version 1-4 of run demo"):
        versions.manifest(PolicyVersion(1, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {}}, r"hold no config\.json"),
        ({"dtype": "int8"}, "dtype: Input should be"),
        ({"tensors_paths": [Path(__file__)]}, "is not a whole safetensors file"),
    ],
)
def test_what_cannot_be_a_version_is_refused_before_anything_is_written(
    store: ObjectStore, model: Model, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(MalformedError, match=message):
        model.publish(WeightVersions(store, "demo"), V1, **changes)
    assert store.list("") == []


def test_only_what_has_no_manifest_and_is_of_an_older_lineage_is_deleted(store: ObjectStore, model: Model) -> None:
    versions = WeightVersions(store, "demo")
    model.publish(versions, V1)
    halves = [f"runs/demo/weights/{name}/model.safetensors" for name in ("0-0", "1-8", "2-8", "3-8", "notes")]
    for key in halves:
        store.put(key, b"half")
    before = set(store.list(""))
    assert versions.delete_incomplete(before_lineage=3, keep={START}) == [PolicyVersion(1, 8), PolicyVersion(2, 8)]
    assert before - set(store.list("")) == set(halves[1:3])
    assert versions.versions() == [V1]
