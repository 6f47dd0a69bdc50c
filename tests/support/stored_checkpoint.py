"""Saves checkpoints, and finds their objects in the store by the manifest."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load
from tba_trainer.distributed.checkpoints import TeamCheckpoints
from tba_trainer.learner.learner import TrainerState
from tba_trainer.model.slices import Rows
from torch import Tensor

from tba.store import FileStore, ObjectStore
from tba.wire.checkpoint_manifest import CheckpointManifest, decode_checkpoint_manifest, object_key
from tests.support.waits import until


def manifest_of(store: ObjectStore, key: str) -> CheckpointManifest:
    """Return the manifest of the checkpoint with this key."""
    manifest = decode_checkpoint_manifest(store.get(f"{key}/manifest.json"), what=key)
    assert isinstance(manifest, CheckpointManifest)
    return manifest


def save(checkpoints: TeamCheckpoints, state: TrainerState, rows: Rows) -> str:
    """Write a checkpoint, wait until all of it is stored, and return its key."""
    upload = checkpoints.begin(state, rows, known={}, in_background=False)
    until("it is stored", lambda: upload.wait(0.1))
    if upload.error is not None:
        raise upload.error
    return str(upload.key)


def object_keys(store: ObjectStore, key: str, section: str = "") -> list[str]:
    """Return the keys of the objects of a checkpoint's section, or of all its sections."""
    return [object_key(key, each) for each in manifest_of(store, key).objects if section in ("", each.section)]


def section_tensors(store: ObjectStore | Path, key: str, section: str) -> dict[str, Tensor]:
    """Return the tensors of a section that one process wrote.

    Args:
        store: the store, or the folder of a file store.
    """
    if isinstance(store, Path):
        store = FileStore(store)
    return {name: tensor for each in object_keys(store, key, section) for name, tensor in load(store.get(each)).items()}
