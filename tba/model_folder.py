"""What a folder with a starting model must hold besides its weights."""

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
