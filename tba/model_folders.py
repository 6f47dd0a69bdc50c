"""Checks of model folders in Hugging Face format that need neither torch nor the configuration."""

from __future__ import annotations

from pathlib import Path

from tba.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these is in every folder that `tokenizer.save_pretrained` wrote."""


def check_tokenizer(folder: str | Path, *, key: str = "model.path") -> None:
    """Check before anything starts that a model folder has a tokenizer; without one every searcher would end.

    Args:
        key: of the recipe that names the folder, for errors.

    Raises:
        ConfigError: the folder has none.
    """
    # each of these files is enough for some tokenizer class; which one, only transformers knows
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key} {folder} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); save it there with "
            "tokenizer.save_pretrained(...)"
        )


def trust_hint(error: Exception) -> str:
    """Return what to do where transformers refuses to load a model because it comes with code of its own."""
    if "trust_remote_code" not in str(error):
        return ""
    return "; if that code may run, set model.trust_remote_code = true (trust_remote_code of a scorer for its models)"


def check_embedding_model(folder: str | Path | None) -> None:
    """Check before anything starts that `eval.embedding_model`, where one is given, can be loaded.

    Raises:
        ConfigError: the folder is no model in Hugging Face format with a tokenizer.
    """
    if folder is not None:
        check_tokenizer(folder, key="eval.embedding_model")
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"eval.embedding_model {str(folder)!r} holds no config.json; give the folder of a Hugging Face encoder"
        )
