"""GET /v1/versions: the weight versions that the object store has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.weight_chain import publish_files


def publish(folder: Path, *versions: PolicyVersion) -> None:
    tensors = folder / "model.safetensors"
    save_file({"a": np.zeros(10, dtype=np.float32)}, tensors)
    (folder / "config.json").write_text("{}")
    store = WeightVersions(FileStore(folder / "store"), "test")
    for version in versions:
        parent = None if version == START else START
        publish_files(store, version, [tensors], {"config.json": folder / "config.json"}, parent=parent)


def test_versions_are_listed_newest_first_and_a_damaged_manifest_hides_no_other(
    serve_buffer: ServeBuffer, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    client = serve_buffer(store={"url": f"file://{tmp_path / 'store'}"}).client()
    assert client.list_versions().versions == []
    publish(tmp_path, START, PolicyVersion(1, 2), PolicyVersion(1, 10))
    found = client.list_versions()
    assert [one.version for one in found.versions] == ["1-10", "1-2", "0-0"]
    assert (found.versions[0].parent, found.versions[0].dtype, found.num_older) == ("0-0", "float32", 0)
    assert found.versions[0].num_bytes >= 40
    publish(tmp_path, PolicyVersion(1, 11))
    next((tmp_path / "store").rglob("weights/1-11/manifest.json")).write_bytes(b"{")
    for _ in range(2):
        assert [one.version for one in client.list_versions().versions] == ["1-10", "1-2", "0-0"]
