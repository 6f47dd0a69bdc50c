"""Versions that the trainer stores as deltas, over a recorded buffer and a real store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tba_trainer.checkpoints.weight_files import WeightSnapshot
from tba_trainer.loop import publisher

from tba.versions import PolicyVersion
from tba.weights import DeltaSettings, publishing
from tests.support.stored_checkpoint import section_tensors
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World
from tests.support.waits import until


@pytest.fixture(autouse=True)
def _whole_every_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "DeltaSettings", partial(DeltaSettings, keyframe_interval=3))


def test_no_step_waits_until_deltas_are_encoded(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first delta is encoded when step 6 is done, so a loop that waited for it would wait for ever."""
    closed: list[PolicyVersion] = []
    encode, close = publishing.encode_changes, WeightSnapshot.close

    def late(*args: Any, **kwargs: Any) -> list[Path] | None:
        until("step 6 is done", lambda: world.buffer.step >= 6)
        return encode(*args, **kwargs)

    def note(snapshot: WeightSnapshot) -> None:
        closed.append(snapshot.version)
        close(snapshot)

    monkeypatch.setattr(publishing, "encode_changes", late)
    monkeypatch.setattr(WeightSnapshot, "close", note)
    trainer = {"num_steps": 10, "sync_interval": 2, "checkpoint_interval": 99, "learning_rate": {"value": 1e-4}}
    world.train(make_recipe(model, model={"dtype": "bfloat16"}, trainer=trainer))
    manifests = [world.versions.manifest(version) for version in world.versions.versions()]
    assert [str(m.base) if m.base else None for m in manifests] == [None, "0-0", "1-2", "1-4", "1-6", "1-8"]
    assert [m.is_full for m in manifests] == [True, False, False, True, False, False]
    assert world.buffer.marks[-1] == "1-10"
    gauges = world.buffer.beats[-1].gauges
    assert gauges["published_full_bytes_total"] == sum(file.size_bytes for m in manifests for file in m.full)
    assert gauges["published_delta_bytes_total"] == sum(m.delta_bytes for m in manifests)
    trained = section_tensors(world.store, "runs/demo/checkpoints/1-10", "model")
    exported = load_file(world.folder / "store/runs/demo/export/model.safetensors")
    for name, tensor in world.tensors("1-10").items():
        assert torch.equal(tensor, trained[name].bfloat16())
        assert torch.equal(tensor, exported[name])
    until("no snapshot is left", lambda: sorted(closed) == [m.policy_version for m in manifests])


def test_a_delta_that_does_not_pay_is_tried_later(world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, tried = publishing.encode_changes, []

    def note(*args: Any, **kwargs: Any) -> list[Path] | None:
        tried.append(world.buffer.marks[-1])
        return encode(*args, **kwargs)

    monkeypatch.setattr(publishing, "encode_changes", note)
    trainer = {"num_steps": 7, "sync_interval": 1, "learning_rate": {"value": 1e-2}}  # float32: every bit changes
    world.train(make_recipe(model, trainer=trainer))
    assert tried == ["0-0", "1-3", "1-6"]
    assert all(world.versions.manifest(version).delta is None for version in world.versions.versions())
    assert world.buffer.marks[-1] == "1-7"
