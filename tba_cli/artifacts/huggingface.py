"""Download from the Hugging Face hub, with errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.config.data import PrepareItem
from tba.errors import ConfigError, not_installed
from tba.store.file import explain_full_disk
from tba_cli.sizing.model_shape import ModelShape, shape_of_config

MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "README.md", "LICENSE*"]
"""Files of a model to download. Python files are run only if the recipe trusts them."""
PICKLED_FILES = ["pytorch_model*.bin*"]
"""Weights to download if the hub has no safetensors of a model; they are converted at once."""
TOKENIZER_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"]


def download(item: PrepareItem, folder: Path) -> str:
    """Download a model or a data set into a folder; continue where an earlier download stopped.

    Returns:
        The hash of the commit that was downloaded.
    """
    hub, name = hub_library(), item.hub or ""
    patterns = [item.gguf] if item.gguf is not None else MODEL_FILES if item.kind == "model" else None
    elsewhere = f"run it where there is one and copy the folder {item.path} here"
    with _explained(item, f"{elsewhere}, or run it again later (it continues where it stopped)"):
        info = hub.HfApi().repo_info(name, revision=item.revision, repo_type=item.kind, files_metadata=True)
        files = {file.rfilename: file.size for file in info.siblings}
        # an old repository: its pickles are converted after the download
        if patterns is MODEL_FILES and not any(file.endswith(".safetensors") for file in files):
            patterns = [*MODEL_FILES, *PICKLED_FILES]
        fetch = functools.partial(hub.snapshot_download, repo_type=item.kind, local_dir=folder)
        # the commit, not the branch: a push meanwhile must not mix two states
        fetch(name, revision=info.sha, allow_patterns=patterns)
        if item.tokenizer is not None:
            fetch(item.tokenizer, allow_patterns=TOKENIZER_FILES)
    wanted = list(hub.utils.filter_repo_objects(files, allow_patterns=patterns))
    if not wanted:
        raise ConfigError(f"{item.kind} {name} has no file that matches {patterns}; correct `hub` or `gguf`")
    # the library takes a folder as it is where the hub goes away before it lists the files
    for file in wanted:
        path = folder / file
        if not path.is_file() or files[file] not in (None, path.stat().st_size):
            raise ConfigError(f"{item.kind} {name}: {file} was not fetched completely; run this command again")
    return info.sha


def shape_on_hub(name: str, revision: str | None, *, tokenizer: Path | None = None) -> ModelShape:
    """Return the shape of a model on the hub; this downloads only its config, and its tokenizer if given a folder."""
    hub = hub_library()
    item = PrepareItem(path=name, kind="model", hub=name, revision=revision)
    with _explained(item, "fetch it first (tba data prepare RECIPE)"):
        info = hub.HfApi().repo_info(name, revision=revision, repo_type="model")
        config = json.loads(Path(hub.hf_hub_download(name, "config.json", revision=info.sha)).read_bytes())
        if tokenizer is not None:
            patterns = [*TOKENIZER_FILES, "*config.json", "*.jinja"]
            hub.snapshot_download(name, revision=info.sha, local_dir=tokenizer, allow_patterns=patterns)
    count = getattr(getattr(info, "safetensors", None), "total", None)
    shape = None if count is None else shape_of_config(config, num_params=count)
    if shape is None:
        raise ConfigError(f"{name} on the hub does not say its sizes")
    return shape


@contextlib.contextmanager
def _explained(item: PrepareItem, without_network: str) -> Iterator[None]:
    """Turn an error inside the `with` block into a ConfigError; `without_network` says what to do without a network."""
    what, place = f"{item.kind} {item.hub}", "model.path" if item.at_start and not item.gguf else "[[prepare]]"
    try:
        yield
    except Exception as error:  # those of the hub's HTTP library, which this package does not import
        full = explain_full_disk(error, item.path) if isinstance(error, OSError) else None
        if full is not None:
            raise ConfigError(f"{what} could not be fetched: {full}") from None
        said = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"{what} could not be fetched ({type(error).__name__}: {said}): check its name and revision in {place}; if "
            f"it is private or behind a licence, accept that at https://huggingface.co/{item.hub} and log in with `hf "
            f"auth login` (or set HF_TOKEN; Compose: secrets/hf_token); without a network, {without_network}"
        ) from None


def hub_library() -> Any:
    """Return the module huggingface_hub."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise not_installed("fetching from the Hugging Face hub", "huggingface_hub") from None
