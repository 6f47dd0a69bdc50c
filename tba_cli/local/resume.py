"""Resume a run with the recipe that it began with, and find changes of the recipe's file since then."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tba.config.recipe import CONSTANT_SETTINGS
from tba.config.recipe_file import read_document
from tba.errors import ConfigError
from tba.tls import with_bare_urls
from tba_cli.run_folder import RunFolder

CONSTANT = ("run", "data", "model.warm_start", *CONSTANT_SETTINGS)
"""Sections and keys that cannot change within a run: weights, prompts and rollouts were made with them."""
ABSENT = "not there"


def resume_recipe(
    folder: RunFolder, path: str | Path | None, sets: Sequence[str], *, on_difference: Callable[[str], None]
) -> Recipe:
    """Return the recipe that a run continues with: the one that it began with, plus `sets`.

    Args:
        path: the recipe file that the user named, which must not have changed; None: no file was named.
        on_difference: called with a line of text for each key that differs.
    """
    # the variables of the start are in it already; those of this shell may be for something else
    recipe = load_recipe(folder.recipe_path, sets=sets, environ={})
    # recipe.json of the run is the resolved recipe: its form differs from that of the file
    if path is None or Path(path).absolute() == folder.recipe_path:
        return recipe
    own = shlex.join([*this_program(), "run", os.path.relpath(folder.recipe_path), "--resume"])
    try:
        before = json.loads(folder.recipe_file_path.read_bytes())
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict):
        raise ConfigError(
            f"{folder.recipe_file_path} is missing or damaged, so {path} cannot be compared with it; continue the run "
            f"as it began, with --set KEY=VALUE for what is to change: {own}"
        )
    now = read_document(Path(path))
    for key, (old, new) in differences(before, now):
        on_difference(with_bare_urls(f"{path}: {key} was {old!r} when the run began, and is {new!r} now"))
    if now != before:
        raise ConfigError(
            f"recipe {path} has changed since run {recipe.run.name!r} began (see above); begin it again with --fresh, "
            f"or continue as it began, and with --set KEY=VALUE for what is to change: {own}"
        )
    return recipe


def this_program() -> list[str]:
    """Return the words that start this program again in this shell: `tba` is not always on PATH."""
    typed = sys.argv[0]
    if Path(typed).name != "tba":
        return [sys.executable, "-m", "tba_cli.main"]
    found = shutil.which("tba")
    return ["tba"] if found is not None and os.path.realpath(found) == os.path.realpath(typed) else [typed]


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the dotted keys in which two documents differ, with both values; `ABSENT` stands for a missing key."""
    for key in sorted({*before, *after}):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", (old, new)


def check_constant(began: Recipe, taken: Recipe) -> None:
    """Raise ConfigError if a setting in CONSTANT has changed since the run began."""
    sections = {name.partition(".")[0] for name in CONSTANT}
    before, after = (recipe.model_dump(mode="json", include=sections) for recipe in (began, taken))
    for key, (old, new) in differences(before, after):
        if not any(f"{key}.".startswith(f"{name}.") for name in CONSTANT):
            continue
        raise ConfigError(
            f"{key} was {old!r} when run {began.run.name!r} began, and cannot become {new!r} within a run: set it "
            "back, or begin another run with --run-name"
        )
