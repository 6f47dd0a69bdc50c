"""What a folder with a model must hold besides its weights."""

from __future__ import annotations

from pathlib import Path

from tba.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these is in every folder that `tokenizer.save_pretrained` wrote."""


def check_tokenizer(folder: str | Path) -> None:
    """Find out before anything starts that every searcher would die for want of a tokenizer.

    Raises:
        ConfigError: the folder holds none.
    """
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path {folder} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); save it there with "
            "tokenizer.save_pretrained(...)"
        )


def check_embedding_model(folder: str | Path | None) -> None:
    """Find out before anything starts that `eval.embedding_model`, where one is named, could not be loaded.

    Raises:
        ConfigError: the folder is no model in Hugging Face format with a tokenizer.
    """
    if folder is None:
        return
    if (
        not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)
        or not (Path(folder) / "config.json").is_file()
    ):
        raise ConfigError(
            f"eval.embedding_model {str(folder)!r} holds no model with a tokenizer (config.json, "
            f"{TOKENIZER_FILES[0]}); give the folder of a Hugging Face encoder, or leave it out"
        )
