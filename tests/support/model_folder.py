"""A folder in the layout of a Hugging Face model, for tests that do not load it with torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def make_model_folder(folder: Path, *, seed: int = 0) -> Path:
    """Write config, tokenizer and one small file of weights, which follow from the seed; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    (folder / "tokenizer.json").write_text("{}")
    weights = np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)
    save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")
    (folder / "main").mkdir(exist_ok=True)
    (folder / "main" / "empty.txt").write_text("")
    return folder
