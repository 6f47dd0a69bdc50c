"""A published weight version as a folder that transformers and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

from tba.errors import MalformedError
from tba.export.card import RunFacts, render_card
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire.manifest import Manifest

CARD_NAME = "README.md"
CONFIG_NAME = "config.json"


def write_export(versions: WeightVersions, version: PolicyVersion, folder: Path, facts: RunFacts) -> Manifest:
    """Pull a version into `folder`, every digest verified, and write its model card beside it.

    Raises:
        ObjectNotFoundError: the version does not exist (any more).
        DigestError, MalformedError: what the store holds is damaged.
        StoreUnavailableError
    """
    manifest = versions.download(version, folder)
    _name_dtype(folder / CONFIG_NAME, manifest.dtype)
    (folder / CARD_NAME).write_text(render_card(manifest, facts))
    return manifest


def _name_dtype(path: Path, dtype: str) -> None:
    """The published weights may have another dtype than the starting model, whose config.json this is."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise MalformedError(f"{path.name} of the published version is not JSON: {error}") from None
    config["dtype"] = dtype
    if "torch_dtype" in config:  # the name that transformers used before 4.56
        config["torch_dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
