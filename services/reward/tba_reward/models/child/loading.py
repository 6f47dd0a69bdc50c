"""Finds the files of a model, makes their digest, and loads tokenizer and weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tba_reward.models.messages import ModelFiles

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
WEIGHTS = ("*.safetensors", "*.bin")


class LoadError(Exception):
    """The models are not what the settings say; the message is for the person who wrote them."""


def find_folder(files: ModelFiles) -> Path:
    """The folder with the files of a model; one on the hub is fetched, or found in the cache.

    Raises:
        LoadError: there is no such model, or it has no weights.
    """
    folder = Path(files.path).expanduser()
    if not folder.is_dir():
        if files.path.startswith((".", "/", "~")) or files.path.count("/") > 1:
            raise LoadError(f"there is no folder {files.path!r}; tba data prepare RECIPE fetches what a recipe needs")
        folder = _fetch(files, [*SMALL_FILES, WEIGHTS[0]])
        if not any(folder.glob(WEIGHTS[0])):
            folder = _fetch(files, [*SMALL_FILES, WEIGHTS[1]])
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise LoadError(f"{folder} has no weights ({' or '.join(WEIGHTS)})")
    return folder


def digest_folder(folder: Path) -> str:
    """SHA-256 over names and contents of the files that a model consists of."""
    digest = hashlib.sha256()
    paths = {path for pattern in (*SMALL_FILES, *WEIGHTS) for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def load(files: ModelFiles, folder: Path, kind: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode on its device, and its tokenizer.

    Args:
        kind: one of the Auto classes of transformers.

    Raises:
        LoadError: a dtype or device that torch does not know.
        Exception: whatever transformers raises on files that it cannot read.
    """
    device = files.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if files.dtype == "auto" else getattr(torch, files.dtype, None)
    if dtype != "auto" and not isinstance(dtype, torch.dtype):
        raise LoadError(f"dtype {files.dtype!r} is none of torch; take float32, bfloat16, float16 or auto")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=files.trust_remote_code)
    model, report = kind.from_pretrained(
        folder, dtype=dtype, trust_remote_code=files.trust_remote_code, output_loading_info=True
    )
    if report["missing_keys"]:  # transformers would fill them with noise and go on
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise LoadError(f"{files.path} lacks weights of a {type(model).__name__}: {some}; is it another kind of model?")
    return model.to(device).eval(), tokenizer


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, wanted: int | None) -> int:
    """The number of tokens that a model can take, or `wanted` if that is less."""
    config = model.config.get_text_config()
    limits = [tokenizer.model_max_length]
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        # the Roberta family counts positions from behind its padding index
        offset = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
        limits.append(positions if offset is None else positions - offset - 1)
    if wanted is not None:
        limits.append(wanted)
    return min(limits)


def _fetch(files: ModelFiles, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(files.path, revision=files.revision, allow_patterns=patterns))
    except Exception as error:  # many kinds: no such repository, gated, no network, a full disk
        raise LoadError(
            f"{files.path!r} is neither a folder nor can it be fetched from the hub ({type(error).__name__}: {error})"
        ) from error
