"""Read the headers of a model folder's safetensors files, and check that no tensor is missing, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.errors import ConfigError, MalformedError, StoreError
from tba.weights import tensor_header

INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the header of every tensor (dtype, shape) by its name; ConfigError if a tensor of the index is missing."""
    index, wanted = folder / INDEX, set[str]()
    if index.is_file():
        try:
            wanted.update(json.loads(index.read_bytes())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is damaged: {type(error).__name__}: {error}") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: there is no .safetensors file")
    try:
        found = {name: header for file in files for name, header in tensor_header(file).items()}
    except (MalformedError, StoreError) as error:
        raise ConfigError(str(error)) from None
    if missing := wanted - found.keys():
        raise ConfigError(f"{folder}: {len(missing)} tensors of its {INDEX} are in no file: {min(missing)}")
    return found
