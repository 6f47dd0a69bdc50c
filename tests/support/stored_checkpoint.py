"""What lies in the store of a checkpoint, found by its manifest."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from tba.store import FileStore, ObjectStore
from tba.wire.checkpoint_manifest import CheckpointManifest, decode_checkpoint_manifest, object_key


def manifest_of(store: ObjectStore, key: str) -> CheckpointManifest:
    """Return the manifest of a checkpoint, by its key."""
    manifest = decode_checkpoint_manifest(store.get(f"{key}/manifest.json"), what=key)
    assert isinstance(manifest, CheckpointManifest)
    return manifest


def object_keys(store: ObjectStore, key: str, section: str = "") -> list[str]:
    """Return the keys of the objects of a section, or of all."""
    return [object_key(key, each) for each in manifest_of(store, key).objects if section in ("", each.section)]


def section_tensors(store: ObjectStore | Path, key: str, section: str) -> dict[str, Tensor]:
    """Return the tensors of a section that one process wrote.

    Args:
        store: or its folder.
    """
    if isinstance(store, Path):
        store = FileStore(store)
    return {name: tensor for each in object_keys(store, key, section) for name, tensor in load(store.get(each)).items()}
