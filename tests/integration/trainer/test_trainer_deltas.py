"""Versions that the trainer stores as deltas, over a recorded buffer and a real store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.checkpoints.weight_files import WeightSnapshot

from tba.errors import ConfigError, StoreUnavailableError, TbaError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import sha256_of_file, shares
from tba.weights.digest import legacy_params_sha256, open_tensors
from tests.support.stored_checkpoint import section_tensors
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World, failing
from tests.support.waits import until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_versions_are_deltas_between_full_ones_and_no_step_waits_until_they_are_encoded(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first delta is encoded when step 6 is done, so a loop that waited for it would wait for ever."""
    closed: list[PolicyVersion] = []
    encode, close = shares.encode_changes, WeightSnapshot.close

    def late(*args: Any, **kwargs: Any) -> list[Path] | None:
        until("step 6 is done", lambda: world.buffer.step >= 6)
        return encode(*args, **kwargs)

    def note(snapshot: WeightSnapshot) -> None:
        closed.append(snapshot.version)
        close(snapshot)

    monkeypatch.setattr(shares, "encode_changes", late)
    monkeypatch.setattr(WeightSnapshot, "close", note)
    trainer = {"num_steps": 10, "sync_interval": 2, "checkpoint_interval": 99, "learning_rate": {"value": 1e-4}}
    store = {"keyframe_interval": 3, "delta_min_bytes": 0}
    world.train(make_recipe(model, model={"dtype": "bfloat16"}, trainer=trainer, store=store))
    manifests = [world.versions.manifest(version) for version in world.versions.versions()]
    bases = [None, "0-0", "1-2", "1-4", "1-6", "1-8"]
    assert [(str(m.base) if m.base else None, m.is_full) for m in manifests] == list(
        zip(bases, [True, False, False, True, False, False], strict=True)
    )
    latest = world.versions.latest()
    assert latest is not None
    assert str(latest[0]) == world.buffer.marks[-1] == "1-10"
    gauges = world.buffer.beats[-1].gauges
    assert gauges["published_full_bytes_total"] == sum(file.size_bytes for m in manifests for file in m.full)
    assert gauges["published_delta_bytes_total"] == sum(m.delta_bytes for m in manifests)
    trained = section_tensors(world.store, "runs/demo/checkpoints/1-10", "model")
    exported = load_file(world.folder / "store/runs/demo/export/model.safetensors")
    for name, tensor in world.tensors("1-10").items():
        assert torch.equal(tensor, trained[name].bfloat16())
        assert torch.equal(tensor, exported[name])
    until("no snapshot is left", lambda: sorted(closed) == [m.policy_version for m in manifests])


def test_where_a_delta_does_not_pay_the_next_try_is_a_keyframe_later_and_a_failed_pointer_stops_nothing(
    world: World, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, put, tried = shares.encode_changes, FileStore.put, []

    def note(*args: Any, **kwargs: Any) -> list[Path] | None:
        tried.append(world.buffer.marks[-1])
        return encode(*args, **kwargs)

    def no_pointer(self: FileStore, key: str, data: bytes, *, create_only: bool = False) -> None:
        if key.endswith("/latest.json"):
            raise StoreUnavailableError("the store is away")
        put(self, key, data, create_only=create_only)

    monkeypatch.setattr(shares, "encode_changes", note)
    monkeypatch.setattr(FileStore, "put", no_pointer)
    trainer = {"num_steps": 7, "sync_interval": 1, "learning_rate": {"value": 1e-2}}  # float32: every bit changes
    world.train(make_recipe(model, trainer=trainer, store={"keyframe_interval": 3, "delta_min_bytes": 0}))
    assert tried == ["0-0", "1-3", "1-6"]
    assert all(world.versions.manifest(version).delta is None for version in world.versions.versions())
    assert world.buffer.marks[-1] == "1-7"
    assert world.versions.latest() is None


def test_a_run_whose_starting_model_an_older_release_published_goes_on_with_deltas_against_it(
    world: World, model: Path, tmp_path: Path
) -> None:
    store = {"delta_min_bytes": 0}
    trainer = {"sync_interval": 2, "learning_rate": {"value": 1e-4}}
    recipe = make_recipe(model, model={"dtype": "bfloat16"}, trainer=trainer, store=store)
    world.buffer.before = failing(1, lambda: TbaError("killed"), "ack")
    with pytest.raises(TbaError, match="killed"):
        world.train(recipe)
    write_as_schema_1(world, START)
    other = make_tiny_model(tmp_path / "other", seed=1, hidden_size=32)
    with pytest.raises(ConfigError, match=r"model\.path does not hold the model"):
        world.train(make_recipe(other, model={"dtype": "bfloat16"}))
    world.train(recipe)
    assert world.buffer.marks == ["0-0", "0-0", "2-2", "2-4"]
    bases = [world.versions.manifest(PolicyVersion(2, step)).base for step in (2, 4)]
    assert bases == [START, PolicyVersion(2, 2)]
    trained = section_tensors(world.store, "runs/demo/checkpoints/2-4", "model")
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in world.tensors("2-4").items())


def write_as_schema_1(world: World, version: PolicyVersion) -> None:
    """Write the manifest of a full version again, as releases before deltas wrote it."""
    key = f"runs/demo/weights/{version}/manifest.json"
    document = json.loads(world.store.get(key))
    path = world.folder / f"store/runs/demo/weights/{version}/model.safetensors"
    tensors = {"name": path.name, "key": document["full"][0]["key"], "size_bytes": path.stat().st_size}
    tensors["sha256"] = sha256_of_file(path)
    document |= {"schema": 1, "kind": "full", "tensors": [tensors]}
    document["params_sha256"] = legacy_params_sha256(open_tensors([path]))
    del document["full"], document["delta"]
    world.store.put(key, json.dumps(document).encode())
