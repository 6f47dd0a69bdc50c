"""Folders in both stores: pushed, listed, pulled; killed halves, damage, and what is never overwritten."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tba.errors import ConfigError, DigestError, MalformedError, WaitTimeoutError
from tba.store import ObjectStore
from tba_cli.artifacts import ArtifactStore, RequiredFolder
from tba_cli.artifacts.artifact_store import pull_folders
from tests.support.model_folder import make_model_folder
from tests.support.waits import until


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def artifacts(store: ObjectStore, said: list[str]) -> ArtifactStore:
    return ArtifactStore(store, said.append)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "models" / "tiny")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_what_is_pulled_is_what_was_pushed(artifacts: ArtifactStore, model: Path, tmp_path: Path) -> None:
    pushed = artifacts.push("model", "group/tiny", model)
    found = artifacts.find("model", "group/tiny")
    assert found == pushed
    assert artifacts.find("model", "group") is None
    copy = tmp_path / "copy"
    assert artifacts.pull(pushed, copy) == len(pushed.files) == 4
    assert contents(copy) == contents(model)
    assert artifacts.pull(pushed, copy) == 0


def test_the_same_folder_again_changes_nothing(
    artifacts: ArtifactStore, store: ObjectStore, model: Path, said: list[str]
) -> None:
    first = artifacts.push("model", "tiny", model)
    keys = store.list("models/")
    assert artifacts.push("model", "tiny", model) == first
    assert store.list("models/") == keys
    assert "is there already" in said[-1]


def test_another_content_under_the_same_name_is_refused(artifacts: ArtifactStore, model: Path) -> None:
    old = artifacts.push("model", "tiny", model)
    make_model_folder(model, seed=1)
    with pytest.raises(ConfigError, match=r"has other content than .*; rename one of them"):
        artifacts.push("model", "tiny", model)
    assert artifacts.find("model", "tiny") == old


def test_a_push_that_was_killed_is_invisible_and_continues(
    artifacts: ArtifactStore, store: ObjectStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", killed)  # of the manifest
        with pytest.raises(KeyboardInterrupt):
            artifacts.push("model", "tiny", model)
    assert artifacts.find("model", "tiny") is None
    before = set(store.list("models/"))
    artifacts.push("model", "tiny", model)
    assert set(store.list("models/")) - before == {"models/tiny/manifest.json"}


def test_damage_in_the_store_is_not_believed(
    artifacts: ArtifactStore, store: ObjectStore, model: Path, tmp_path: Path
) -> None:
    manifest = artifacts.push("model", "tiny", model)
    weights = next(file for file in manifest.files if file.path == "model.safetensors")
    store.put(f"models/tiny/files/{weights.sha256}", b"x" * weights.size_bytes)
    with pytest.raises(DigestError, match=r"is not the model\.safetensors that was pushed"):
        artifacts.pull(manifest, tmp_path / "copy")
    assert not (tmp_path / "copy" / "model.safetensors").exists()
    store.put("models/tiny/manifest.json", b'{"schema_version": 1, "ki')
    with pytest.raises(MalformedError, match="remove it, and push it again"):
        artifacts.push("model", "tiny", model)


def test_a_pull_fetches_what_is_missing_and_touches_nothing_else(
    artifacts: ArtifactStore, model: Path, tmp_path: Path
) -> None:
    manifest = artifacts.push("model", "tiny", model)
    copy = tmp_path / "copy"
    artifacts.pull(manifest, copy)
    (copy / "config.json").unlink()
    (copy / "notes.txt").write_text("mine")
    assert artifacts.pull(manifest, copy) == 1
    assert contents(copy) == contents(model) | {"notes.txt": b"mine"}


def test_a_persons_folder_is_never_overwritten(artifacts: ArtifactStore, model: Path, tmp_path: Path) -> None:
    manifest = artifacts.push("model", "tiny", model)
    own = make_model_folder(tmp_path / "own", seed=7)
    before = contents(own)
    with pytest.raises(ConfigError, match=r"own/model\.safetensors is not the file of models/tiny "):
        artifacts.pull(manifest, own)
    assert contents(own) == before
    (own / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert artifacts.pull(manifest, own) == 0  # the same content is no error, and is left as it is


def test_a_folder_that_may_only_be_read_is_fine_as_long_as_it_is_whole(
    artifacts: ArtifactStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = artifacts.push("model", "tiny", model)
    copy = tmp_path / "copy"
    artifacts.pull(manifest, copy)

    def read_only(path: Path) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(artifacts._store, "get_file", lambda key, path: read_only(path))
    assert artifacts.pull(manifest, copy) == 0
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"copy cannot be written \(Read-only file system\); mount a volume there"):
        artifacts.pull(manifest, copy)


def test_pickles_and_caches_are_left_out_and_said(
    artifacts: ArtifactStore, model: Path, tmp_path: Path, said: list[str]
) -> None:
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    (model / ".cache").mkdir()
    (model / ".cache" / "x").write_text("x")
    manifest = artifacts.push("model", "tiny", model)
    assert {"pytorch_model.bin", ".cache/x"}.isdisjoint(file.path for file in manifest.files)
    assert "left out .cache/x, pytorch_model.bin" in said[0]


def test_what_is_no_whole_folder_is_not_pushed(artifacts: ArtifactStore, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(model / "pipe")
    for folder, says in (
        (tmp_path / "nothing", "is not a folder"),
        (tmp_path / "empty", "no file that can be pushed"),
        (model, "pipe is not a file that can be pushed"),
    ):
        with pytest.raises(ConfigError, match=says):
            artifacts.push("model", "tiny", folder)


def test_a_pull_waits_for_the_push(
    artifacts: ArtifactStore, model: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_cli.artifacts.artifact_store.POLL_S", 0.05)
    wanted = RequiredFolder("model", str(tmp_path / "pod" / "models" / "tiny"), "model.path", frozenset({"trainer"}))
    with pytest.raises(
        WaitTimeoutError, match=r"wait 'model-push': .*models/tiny \(model\.path\) was not in the store"
    ):
        pull_folders(artifacts, [wanted], wait_s=0.05)
    errors: list[BaseException] = []

    def pull() -> None:
        try:
            pull_folders(artifacts, [wanted], wait_s=60)
        except BaseException as error:
            errors.append(error)

    said.clear()
    thread = threading.Thread(target=pull, daemon=True)
    thread.start()
    until("the pull waits", lambda: any("wait 'model-push'" in line for line in said))
    artifacts.push("model", "tiny", model)
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []
    assert contents(Path(wanted.path)) == contents(model)
    assert said[-1].endswith("fetched")
