"""A local run finds its origin, copies from it, and refuses an unsuitable one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError
from tba.store import FileStore
from tba.wire import StoredObject, encode_manifest
from tba.wire.checkpoint_manifest import CheckpointManifest, CheckpointObject
from tba.wire.snapshot_manifest import (
    SavedLineage,
    SavedPublication,
    SnapshotManifest,
    SnapshotSource,
    encode_snapshot_manifest,
)
from tba.wire.weight_manifest import Delta, DeltaObject, TensorFile, sha256_hex, table_sha256
from tba_cli.commands import fork
from tba_cli.main import main
from tba_cli.run_folder import RunFolder
from tba_cli.setup.origin import check_searchers, copy_origin, find_origin
from tests.support.wire_values import manifest

SOURCE = SnapshotSource("old", "end")
IN_NEITHER = r"there is no snapshot old/other in file://.*new/store or file://.*old/store"


def make_recipe(**sections: dict[str, Any]) -> Recipe:
    document: dict[str, Any] = {"run": {"name": "new", "snapshot": "old/end"}, "model": {"path": "model"}}
    document["data"] = {"generator": "addition"}
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    return parse_recipe(document, where="test")


class Place:
    """A folder of runs, with one run `old`: a snapshot, version 1-4 (a delta against 0-0) and its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.runs_dir = path / "runs"
        self.old = FileStore(self.runs_dir / "old" / "store")
        self.new = FileStore(self.runs_dir / "new" / "store")
        recipe = make_recipe(run={"name": "old"}).model_dump(mode="json")
        recipe["store"]["url"] = self.old.url
        self.runs_dir.joinpath("old").mkdir(parents=True)
        (self.runs_dir / "old" / "config.json").write_text(json.dumps(recipe))
        weights = self.put("runs/old/weights/0-0/model.safetensors", b"weights!")
        full = TensorFile(name=weights.name, key=weights.key, size_bytes=weights.size_bytes)
        self.put_manifest("0-0", full=[full])
        changes = self.put("runs/old/weights/1-4/delta-00001-abc.safetensors", b"changes!")
        delta = DeltaObject(name=changes.name, key=changes.key, size_bytes=changes.size_bytes, digest="ab" * 16)
        self.put_manifest("1-4", delta=Delta(base="0-0", num_to_full=1, objects=[delta]))
        model: dict[str, Any] = {"section": "model", "lineage": 1, "size_bytes": 8, "slices": {}}
        own, other = (CheckpointObject(**model, digest=digit * 32) for digit in "ab")
        checkpoint = CheckpointManifest(run="old", version="1-4", state_sha256="0" * 64, objects=[own])
        self.old.put("runs/old/checkpoints/1-4/state.json", b"state")
        self.old.put("runs/old/checkpoints/1-4/manifest.json", checkpoint.model_dump_json().encode())
        for each in (own, other):
            self.old.put(f"runs/old/checkpoints/objects/{each.name}", b"content!")
        self.old.put("runs/old/checkpoints/1-8/manifest.json", b"{}")
        known: dict[str, Any] = {"run": "old", "name": "end", "tba_version": "0", "storage_format": 1, "lineage": 1}
        known |= {"log_position": 100, "created_at_s": 0.0, "step": 8, "latest_version": "1-8", "num_scored": 90}
        known |= {"num_pending": 5, "num_failed": 1, "num_prompts": 3, "prompts": [], "policy_temperature": 1.0}
        snapshot = SnapshotManifest(
            **known,
            lineages={1: SavedLineage(parent="0-0", trainer_id="trainer-1", created_at_s=0.0)},
            marks=[SavedPublication(position=50, version="1-4")],
            start_params_sha256=None,
            rollouts=[self.put(SOURCE.prefix + "rollouts-0.msgpack", b"rollouts")],
            live=[self.put(SOURCE.prefix + "live-0.msgpack", b"live")],
        )
        self.put(SOURCE.prefix + "rollouts-of-an-attempt-that-was-killed", b"left")
        self.old.put(SOURCE.manifest_key, encode_snapshot_manifest(snapshot))

    def put_manifest(self, version: str, **stored: Any) -> None:
        config = self.put("runs/old/files/abc/config.json", b"{}")
        place = {"run": "old", "version": version, "parent": None, "files": [config]}
        content = {"tensors": [], "params_sha256": table_sha256([]), "full": [], "delta": None, **stored}
        made = manifest().model_copy(update=place | content)
        self.old.put(f"runs/old/weights/{version}/manifest.json", encode_manifest(made))

    def put(self, key: str, data: bytes) -> StoredObject:
        self.old.put(key, data)
        return StoredObject(name=key.rpartition("/")[2], key=key, size_bytes=len(data), sha256=sha256_hex(data))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


SNAPSHOT_KEYS = [SOURCE.prefix + name for name in ("live-0.msgpack", "manifest.json", "rollouts-0.msgpack")]


def test_a_snapshot_of_another_local_run_is_found_and_copied(place: Place) -> None:
    origin = find_origin(make_recipe(), place.new, runs_dir=place.runs_dir)
    assert origin is not None
    assert origin.store.url == place.old.url
    assert copy_origin(origin, place.new) == 3
    assert place.new.list("") == SNAPSHOT_KEYS
    assert all(place.new.get(key) == place.old.get(key) for key in place.new.list(""))


def test_a_fork_takes_the_version_and_its_checkpoint_along(place: Place) -> None:
    recipe = make_recipe(run={"fork_version": "1-4"}, trainer={"num_steps": 10})
    origin = find_origin(recipe, place.new, runs_dir=place.runs_dir)
    assert origin is not None
    keys = list(origin.object_keys())
    assert keys[-1] == SOURCE.manifest_key, "the snapshot exists once everything else does"
    for folder in ("runs/old/weights/0-0/", "runs/old/weights/1-4/", "runs/old/checkpoints/1-4/"):
        assert [key for key in keys if key.startswith(folder)][-1] == f"{folder}manifest.json"
    copy_origin(origin, place.new)
    assert place.new.list("runs/old/weights/") == place.old.list("runs/old/weights/"), "with what it is a delta against"
    assert keys.index("runs/old/weights/0-0/manifest.json") < keys.index("runs/old/weights/1-4/manifest.json")
    assert "runs/old/files/abc/config.json" in place.new.list("runs/old/files/")
    assert not place.new.list("runs/old/checkpoints/1-8/")
    objects = place.new.list("runs/old/checkpoints/objects/")
    assert objects == [f"runs/old/checkpoints/objects/1-{'a' * 32}.safetensors"], "what other checkpoints name stays"


def test_what_the_store_of_the_run_holds_already_is_not_copied(place: Place) -> None:
    origin = find_origin(make_recipe(), place.old, runs_dir=place.runs_dir / "none")
    assert origin is not None
    assert copy_origin(origin, place.old) == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"name": "old"}}, "cannot begin with a snapshot of itself"),
        ({"run": {"snapshot": "old/other"}}, IN_NEITHER),
        ({"run": {"snapshot": "gone/end"}}, "make it with `tba buffer save end gone`"),
        ({"run": {"fork_version": "1-5"}}, r"has no weight version 1-5 in .*; the newest are 0-0, 1-4"),
        ({"run": {"fork_version": "1-4"}, "trainer": {"num_steps": 4}}, "the fork begins at step 4"),
        (
            {"searcher": {"num_searchers": 0}, "sampling": {"min_size_to_sample": 96}},
            "holds 90 scored rollouts, and sampling.min_size_to_sample is 96",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(place, sections, message):
    with pytest.raises(ConfigError, match=message):
        find_origin(make_recipe(**sections), place.new, runs_dir=place.runs_dir)


@pytest.fixture
def saved(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The (run, snapshot) pairs that a fork saved. The run `old` was killed: its addresses are still there."""
    found: list[tuple[str, str]] = []
    monkeypatch.chdir(place.runs_dir.parent)
    monkeypatch.setattr(fork, "save_ended", lambda folder, name: found.append((folder.path.name, name)))
    monkeypatch.setattr("tba_cli.commands.run.run_local", lambda recipe, **how: 0)
    old = RunFolder(place.runs_dir / "old")
    old.recipe_path.write_text(old.config_path.read_text())
    old.endpoints_path.write_text(json.dumps({"buffer_url": "http://127.0.0.1:9", "tokens_file": None}))
    return found


def test_a_fork_of_a_run_that_was_killed_saves_from_its_files(place: Place, saved: list[tuple[str, str]]) -> None:
    assert main(["run", "--fork", "old@1-4", "--run-name", "new", "--set", "trainer.num_steps=10"]) == 0
    assert saved == [("old", "fork-1-4")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run-name", "new", "--set", "trainer.num_steps=4"], "the fork begins at step 4"),
        (["--run-name", "old", "--set", "trainer.num_steps=10", "--fresh"], "cannot begin with a snapshot of itself"),
        (["--run-name", "begun", "--set", "trainer.num_steps=10"], "exists already; continue with --resume"),
        (["--run-name", "new", "--set", "trainer.num_steps=10", "--resume"], "there is no run to resume"),
    ],
)
def test_a_fork_that_cannot_begin_saves_nothing(place, saved, words, message, capsys):
    with RunFolder(place.runs_dir / "begun").acquire(resume=False, fresh=False):
        (place.runs_dir / "begun" / "recipe.json").write_text("{}")
    assert main(["run", "--fork", "old@1-4", *words]) == 2
    assert (saved, message in capsys.readouterr().err) == ([], True)


def test_a_run_without_searchers_needs_rollouts() -> None:
    check_searchers(make_recipe(searcher={"num_searchers": 0}))
    with pytest.raises(ConfigError, match="nothing would ever be generated"):
        check_searchers(make_recipe(run={"snapshot": None}, searcher={"num_searchers": 0}))


def test_the_recipe_knows_what_goes_with_what() -> None:
    with pytest.raises(ConfigError, match=r"fork_version names a version of the run in run\.snapshot"):
        make_recipe(run={"snapshot": None, "fork_version": "1-4"})
    with pytest.raises(ConfigError, match="needs searchers"):
        make_recipe(searcher={"num_searchers": 0}, sampling={"alternate": True})
    for snapshot in ("old", "old/end/more", "../x"):
        with pytest.raises(ConfigError, match=r"run\.snapshot"):
            make_recipe(run={"snapshot": snapshot})
