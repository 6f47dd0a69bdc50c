"""The end product: a Hugging Face folder in the object store under runs/<run>/export/."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tba.store import ObjectStore
from tba_trainer.snapshots import Snapshots


def write_export(snapshots: Snapshots, files: Mapping[str, Path], folder: Path) -> None:
    """Write config, weights in `model.dtype` and the tokenizer's files; AutoModelForCausalLM loads the folder."""
    snapshots.save_pretrained(folder)
    for name, path in files.items():
        if not (folder / name).exists():
            shutil.copyfile(path, folder / name)


def upload_export(snapshots: Snapshots, files: Mapping[str, Path], store: ObjectStore, run: str) -> str:
    """Write the export and upload it; returns its prefix in the store. Doing it again replaces the files.

    Raises:
        StoreUnavailableError
    """
    prefix = f"runs/{run}/export/"
    with tempfile.TemporaryDirectory(prefix="tba-export-") as name:
        folder = Path(name)
        write_export(snapshots, files, folder)
        for path in sorted(folder.iterdir()):
            store.put_file(prefix + path.name, path)
    return prefix
