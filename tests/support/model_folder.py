"""A folder that looks like a model in Hugging Face format and is read without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def make_model_folder(folder: Path, *, seed: int = 0) -> Path:
    """Config, tokenizer and one small file of weights, a function of the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    (folder / "tokenizer.json").write_text("{}")
    weights = np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)
    save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")
    (folder / "main").mkdir(exist_ok=True)
    (folder / "main" / "empty.txt").write_text("")
    return folder
