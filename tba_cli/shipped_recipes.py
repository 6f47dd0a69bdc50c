"""Find the recipes that ship with tba by name, so that `tba run quickstart` works without the clone."""

from __future__ import annotations

import argparse
from pathlib import Path

from tba.errors import did_you_mean

FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parents[1] / "recipes")
"""Folders of recipes: in an installed package, and in the clone. pyproject.toml copies the second into the wheel."""


def recipe_path(word: str) -> str:
    """Return the path of the recipe that a word of the command line names.

    Args:
        word: the path of a file, or the bare name of a recipe that ships with tba, such as `quickstart`. A file of
            that name in the current folder wins.

    Raises:
        argparse.ArgumentTypeError: it is a bare name, and neither a file nor a recipe that ships with tba.
    """
    path = Path(word)
    if path.suffix or path.name != word or path.exists():
        return word
    known = shipped_recipes()
    if word not in known:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no recipe that ships with tba ({', '.join(sorted(known))}); name one of them, or a file"
            f"{did_you_mean(word, known)}"
        )
    return str(known[word])


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that ship with tba, as {name: path}; empty in an image that was made without them."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in folder.glob("*.toml")}
