"""Downloads from the Hugging Face hub; errors say in a sentence what to do."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.config.prepare import PrepareItem
from tba.errors import ConfigError

MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
PICKLED_FILES = ["pytorch_model*.bin*"]
"""What a model is fetched in where the hub has no safetensors; it is converted at once."""
TOKENIZER_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"]


def download(item: PrepareItem) -> str:
    """Fetch a model or a data set into the item's folder; goes on where an earlier download stopped.

    Returns:
        The commit that was fetched.

    Raises:
        ConfigError: the hub has no such thing, keeps it behind a licence, or cannot be reached.
    """
    hub, name = _library(), item.hub or ""
    patterns = item.files if item.files is not None else MODEL_FILES if item.kind == "model" else None
    with _explained(item):
        info = hub.HfApi().repo_info(name, revision=item.revision, repo_type=item.kind, files_metadata=True)
        sizes = {file.rfilename: file.size for file in info.siblings}
        if item.kind == "model" and not any(file.endswith(".safetensors") for file in sizes):
            patterns = [*(patterns or []), *PICKLED_FILES]
        fetch = functools.partial(hub.snapshot_download, repo_type=item.kind, local_dir=item.path)
        fetch(name, revision=info.sha, allow_patterns=patterns)
        if item.tokenizer is not None:
            fetch(item.tokenizer, allow_patterns=TOKENIZER_FILES)
    _check_whole(item, sizes, list(hub.utils.filter_repo_objects(sizes, allow_patterns=patterns)))
    return info.sha


def _check_whole(item: PrepareItem, sizes: dict[str, int | None], wanted: Sequence[str]) -> None:
    """Where the hub goes away in the middle, its library takes a folder as it is."""
    if not wanted:
        raise ConfigError(
            f"{item.kind} {item.hub} has no file that matches {item.files or MODEL_FILES}; correct `files`"
        )
    for file in wanted:
        path = Path(item.path) / file
        if not path.is_file() or (sizes[file] is not None and path.stat().st_size != sizes[file]):
            raise ConfigError(f"{item.kind} {item.hub}: {file} was not fetched whole; run this command again")


@contextlib.contextmanager
def _explained(item: PrepareItem) -> Iterator[None]:
    errors = importlib.import_module("huggingface_hub.errors")
    what = f"{item.kind} {item.hub}"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{what} is behind a licence: accept it at https://huggingface.co/{item.hub}, then log in with "
            "`hf auth login` (or set HF_TOKEN) and run this command again"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{what} has no revision {item.revision!r}; correct it in [[prepare]]") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no {what}, or it is private: check the name in [[prepare]], or log in with `hf auth login`"
        ) from None
    except Exception as error:  # the hub's HTTP library has its own, which this package does not import
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{what} could not be fetched ({type(error).__name__}: {reason}); this needs a network: run it where there "
            f"is one and copy the folder {item.path} here, or run it again later (it goes on where it stopped)"
        ) from None


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            "fetching from the Hugging Face hub needs huggingface_hub, which is not installed; install the extra "
            "`data`: pip install 'tba[data]'"
        ) from None
