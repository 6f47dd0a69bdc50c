"""Folders in both stores: pushed, listed, pulled; killed halves, damage, and what is never overwritten."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tba.errors import ConfigError, DigestError, MalformedError, WaitTimeoutError
from tba.store import ObjectStore
from tba_cli.artifacts import ArtifactStore, FolderManifest, RequiredFolder
from tba_cli.artifacts.artifact_store import pull_folders
from tests.support.model_folder import make_model_folder
from tests.support.waits import until


class Artifacts(ArtifactStore):
    """The folders in a store, and a model to push as `tiny`."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.said = store, list[str]()
        super().__init__(store, self.said.append)
        self.model, self.copy = make_model_folder(folder / "models" / "tiny"), folder / "copy"

    def push_model(self) -> FolderManifest:
        return self.push("model", "tiny", self.model)


@pytest.fixture
def artifacts(store: ObjectStore, tmp_path: Path) -> Artifacts:
    return Artifacts(store, tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_what_is_pulled_is_what_was_pushed(artifacts: Artifacts) -> None:
    pushed = artifacts.push("model", "group/tiny", artifacts.model)
    assert (artifacts.find("model", "group/tiny"), artifacts.find("model", "group")) == (pushed, None)
    assert artifacts.pull(pushed, artifacts.copy) == len(pushed.files) == 4
    assert contents(artifacts.copy) == contents(artifacts.model)
    assert artifacts.pull(pushed, artifacts.copy) == 0


def test_the_same_folder_again_changes_nothing(artifacts: Artifacts) -> None:
    first = artifacts.push_model()
    keys = artifacts.store.list("models/")
    assert artifacts.push_model() == first
    assert artifacts.store.list("models/") == keys
    assert "is there already" in artifacts.said[-1]


def test_another_content_under_the_same_name_is_refused(artifacts: Artifacts) -> None:
    old = artifacts.push_model()
    make_model_folder(artifacts.model, seed=1)
    with pytest.raises(ConfigError, match=r"has other content than .*; rename one of them"):
        artifacts.push_model()
    assert artifacts.find("model", "tiny") == old


def test_a_killed_push_is_invisible_and_continues(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(artifacts.store, "put", killed)  # of the manifest
        with pytest.raises(KeyboardInterrupt):
            artifacts.push_model()
    assert artifacts.find("model", "tiny") is None
    before = set(artifacts.store.list("models/"))
    artifacts.push_model()
    assert set(artifacts.store.list("models/")) - before == {"models/tiny/manifest.json"}


def test_damage_in_the_store_is_not_believed(artifacts: Artifacts) -> None:
    manifest = artifacts.push_model()
    weights = next(file for file in manifest.files if file.path == "model.safetensors")
    artifacts.store.put(f"models/tiny/files/{weights.sha256}", b"x" * weights.size_bytes)
    with pytest.raises(DigestError, match=r"is not the model\.safetensors that was pushed"):
        artifacts.pull(manifest, artifacts.copy)
    assert not (artifacts.copy / "model.safetensors").exists()
    artifacts.store.put("models/tiny/manifest.json", b'{"schema_version": 1, "ki')
    with pytest.raises(MalformedError, match="remove it, and push it again"):
        artifacts.push_model()


def test_a_pull_fetches_what_is_missing_and_touches_nothing_else(artifacts: Artifacts) -> None:
    manifest = artifacts.push_model()
    artifacts.pull(manifest, artifacts.copy)
    (artifacts.copy / "config.json").unlink()
    (artifacts.copy / "notes.txt").write_text("mine")
    assert artifacts.pull(manifest, artifacts.copy) == 1
    assert contents(artifacts.copy) == contents(artifacts.model) | {"notes.txt": b"mine"}


def test_a_persons_folder_is_never_overwritten(artifacts: Artifacts, tmp_path: Path) -> None:
    manifest = artifacts.push_model()
    own = make_model_folder(tmp_path / "own", seed=7)
    before = contents(own)
    with pytest.raises(ConfigError, match=r"own/model\.safetensors is not the file of models/tiny "):
        artifacts.pull(manifest, own)
    assert contents(own) == before
    (own / "model.safetensors").write_bytes((artifacts.model / "model.safetensors").read_bytes())
    assert artifacts.pull(manifest, own) == 0  # the same content is no error, and is left as it is


def test_a_whole_folder_may_be_one_that_can_only_be_read(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = artifacts.push_model()
    artifacts.pull(manifest, artifacts.copy)

    def read_only(path: Path) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(artifacts.store, "get_file", lambda key, path: read_only(path))
    assert artifacts.pull(manifest, artifacts.copy) == 0
    (artifacts.copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"copy cannot be written \(Read-only file system\); mount a volume there"):
        artifacts.pull(manifest, artifacts.copy)


def test_pickles_and_caches_are_left_out_and_said(artifacts: Artifacts) -> None:
    (artifacts.model / "pytorch_model.bin").write_bytes(b"pickle")
    (artifacts.model / ".cache").mkdir()
    (artifacts.model / ".cache" / "x").write_text("x")
    manifest = artifacts.push_model()
    assert {"pytorch_model.bin", ".cache/x"}.isdisjoint(file.path for file in manifest.files)
    assert "left out .cache/x, pytorch_model.bin" in artifacts.said[0]


def test_what_is_no_whole_folder_is_not_pushed(artifacts: Artifacts, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(artifacts.model / "pipe")
    for folder, says in (
        (tmp_path / "nothing", "is not a folder"),
        (tmp_path / "empty", "no file that can be pushed"),
        (artifacts.model, "pipe is not a file that can be pushed"),
    ):
        with pytest.raises(ConfigError, match=says):
            artifacts.push("model", "tiny", folder)


def test_a_pull_waits_for_the_push(artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_cli.artifacts.artifact_store.POLL_S", 0.05)
    wanted = RequiredFolder("model", str(tmp_path / "pod" / "models" / "tiny"), "model.path", frozenset({"trainer"}))
    sentence = r"wait 'model-push': .*models/tiny \(model\.path\) was not in the store"
    with pytest.raises(WaitTimeoutError, match=sentence):
        pull_folders(artifacts, [wanted], wait_s=0.05)
    artifacts.said.clear()
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull_folders, artifacts, [wanted], wait_s=60)
        until("the pull waits", lambda: any("wait 'model-push'" in line for line in artifacts.said))
        artifacts.push_model()
        pulled.result(60)
    assert contents(Path(wanted.path)) == contents(artifacts.model)
    assert artifacts.said[-1].endswith("fetched")
