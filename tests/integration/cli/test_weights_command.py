"""`tba weights`: versions that are stored whole and as deltas in a real store, and a real buffer that knows of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tba.api import LineageRequest, VersionRequest
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions
from tba_cli.main import main
from tba_cli.run_folder import RunFolder
from tests.support.buffer import SERVICE_PATHS, make_heartbeat, make_prompts, make_recipe, start_stack
from tests.support.weight_chain import publish_files

STEPS = (4, 8, 12, 16, 20, 24)
"""0-0, 1-8, 1-16 and 1-24 are stored whole, all but 0-0 as a delta against the one before it."""
NAMES = ["0-0", *(f"1-{step}" for step in STEPS)]


class Published:
    """A run folder with seven versions of a small bfloat16 model, and its recipe file."""

    def __init__(self, folder: Path, recipe: Any) -> None:
        self.store = FileStore(Path(recipe.store.url.removeprefix("file://")))
        self.versions = WeightVersions(self.store, recipe.run.name)
        self.recipe_path = folder / "recipe.json"
        self.recipe_path.write_text(recipe.model_dump_json())
        files = {name: folder / name for name in ("config.json", "tokenizer.json")}
        for file in files.values():
            file.write_text("{}")
        tensors = {name: torch.full((100, 40), 1.0, dtype=torch.bfloat16) for name in ("a", "b", "c")}
        base = None
        for version in (START, *(PolicyVersion(1, step) for step in STEPS)):
            tensors["a"][0, :4] += 2**-7  # four elements by an ulp
            path, parent = folder / str(version) / "model.safetensors", None if base is None else base.version
            path.parent.mkdir()
            save_file(tensors, path)
            given = {"parent": parent, "base": base, "dtype": "bfloat16", "deltas": DeltaSettings(keyframe_interval=2)}
            manifest = publish_files(self.versions, version, [path], files, **given)
            base = LocalVersion(version, (path,), manifest)

    @property
    def names(self) -> list[str]:
        return [str(version) for version in self.versions.versions()]


@pytest.fixture
def place(tmp_path: Path) -> Published:
    (tmp_path / "made").mkdir()
    sections = {"trainer": {"keep_versions": 2}, "store": {"url": f"file://{tmp_path / 'store'}"}}
    return Published(tmp_path / "made", make_recipe(run="demo", **sections))


def printed(capsys: pytest.CaptureFixture[str], words: str, place: Published, *, code: int = 0) -> str:
    assert main(["weights", *words.split(), "--recipe", str(place.recipe_path)]) == code
    captured = capsys.readouterr()
    return captured.out if code < 2 else captured.err


def test_the_store_alone_tells_how_versions_are_stored(place: Published, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "list", place).splitlines()
    cells = [line.split() for line in lines[1:8]]
    assert [row[0] for row in cells] == NAMES
    assert [row[3] for row in cells] == ["full", *["delta", "both"] * 3]
    assert [row[9:11] for row in cells[:4]] == [["0", "unknown"], ["0-0", "1"], ["1-4", "0"], ["1-8", "1"]]
    assert lines[8].startswith("7 versions, ")
    assert lines[9:] == ["what holds them is unknown: --recipe alone names no buffer service"]
    document = json.loads(printed(capsys, "list --json", place))
    row = document["versions"][3]
    assert (row["kept"], row["kind"], row["num_deltas"]) == (None, "delta", 1)
    assert row["stored_bytes"] * 20 < row["full_bytes"] == 24_000


def test_a_damaged_manifest_hides_no_other_version(place: Published, capsys: pytest.CaptureFixture[str]) -> None:
    (key,) = (key for key in place.store.list("") if "1-8/" in key and key.endswith("manifest.json"))
    place.store.put(key, b"no manifest")
    assert main(["weights", "list", "--recipe", str(place.recipe_path)]) == 2
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()[1:7]] == [name for name in NAMES if name != "1-8"]
    assert "1-8" in captured.err


def test_nothing_is_deleted_unless_somebody_says_what_is_held(place: Published, capsys) -> None:
    assert "nobody says which versions are held" in printed(capsys, "gc", place, code=2)
    place.store.put("runs/demo/weights/1-2/model.safetensors", b"half")
    before = place.store.list("")
    out = printed(capsys, "gc --run-is-over --dry-run", place)
    assert "would delete 1-12: " in out
    assert "would delete what is left of 1-2, which has no manifest: 4 B" in out
    assert place.store.list("") == before
    found = json.loads(printed(capsys, "gc --run-is-over --json", place))
    assert [each["version"] for each in found["deleted"]] == ["1-12", "1-8", "1-4", "1-2"]
    assert found["kept"] == {
        "1-24": ["among the newest 2"],
        "1-20": ["among the newest 2"],
        "1-16": ["needed by 1-20"],
        "0-0": ["starting model"],
    }
    assert place.names == ["0-0", "1-16", "1-20", "1-24"]
    assert not [key for key in place.store.list("runs/demo/weights/") if "/1-2/" in key or "/1-12/" in key]


def test_a_run_whose_lock_is_held_is_not_over_whatever_is_said(place: Published, capsys, tmp_path, monkeypatch) -> None:
    folder = RunFolder(tmp_path / "runs" / "demo")
    with folder.acquire(resume=False, fresh=True):
        folder.config_path.write_text(place.recipe_path.read_text())
        monkeypatch.chdir(tmp_path)
        assert main(["weights", "gc", "demo", "--run-is-over"]) == 2
    assert "nothing was deleted: run 'demo' is in progress, and its buffer cannot be asked" in capsys.readouterr().err
    assert place.names == NAMES


@pytest.fixture
def going(tmp_path: Path) -> Iterator[tuple[Published, Any, RunFolder]]:
    """A run with a real buffer, a searcher that holds 1-4, and all versions announced."""
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.redis_path.mkdir(parents=True)
    sections = {"trainer": {"keep_versions": 2}, "store": {"url": f"file://{folder.store_path}"}}
    stack = start_stack(tmp_path / "stack", redis_folder=folder.redis_path, **sections)
    try:
        (tmp_path / "made").mkdir()
        place = Published(tmp_path / "made", stack.recipe)
        stack.client.upload_prompts(make_prompts(2))
        lineage = stack.client.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))
        for version in place.names:
            stack.client.announce_version(VersionRequest(version=version, token=lineage.token))
        stack.client.heartbeat(make_heartbeat(version="1-4", gauges={}))
        yield place, stack, folder
    finally:
        stack.stop()


def test_the_buffer_says_what_is_held_while_a_run_is_in_progress_and_after_it(going, capsys, monkeypatch, tmp_path):
    place, stack, folder = going
    target = f"--url {stack.recipe.buffer_url}"
    rows = json.loads(printed(capsys, f"list --json {target}", place))["versions"]
    assert {row["version"]: row["kept"] for row in rows} == {
        "0-0": ["starting model", "parent of lineage 1", "needed by 1-4"],
        "1-4": ["held by searcher-0"],
        "1-8": [],
        "1-12": [],
        "1-16": ["needed by 1-20"],
        "1-20": ["among the newest 2"],
        "1-24": ["among the newest 2", "latest"],
    }
    other = place.recipe_path.with_name("other.json")
    document = json.loads(place.recipe_path.read_text())
    document["run"]["name"] = "other"
    other.write_text(json.dumps(document))
    assert main(["weights", "gc", "--run-is-over", *target.split(), "--recipe", str(other)]) == 2
    assert "the buffer service is that of 'test'" in capsys.readouterr().err
    assert "deleted 1-12: " in printed(capsys, f"gc {target}", place)
    assert place.names == ["0-0", "1-4", "1-16", "1-20", "1-24"]
    # over: a read-only buffer over a copy of the files says it, and the searcher is gone
    stack.stop()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, SERVICE_PATHS)))
    for path in (folder.recipe_path, folder.config_path):
        path.write_text(place.recipe_path.read_text())
    folder.marker_path.touch()
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "gc", "demo"]) == 0
    assert place.names == ["0-0", "1-16", "1-20", "1-24"]
