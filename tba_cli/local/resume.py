"""Resume a run with the recipe that it began with, and notice where the recipe's file has changed since.

runs/<name>/recipe_file.json    content of the file when the run began, with the flags and variables on top of it
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.config import Recipe, StrictModel, load_recipe
from tba.config.recipe import CONSTANT_SETTINGS
from tba.config.recipe_file import ENV_PREFIX, read_document
from tba.errors import ConfigError
from tba.tls import with_bare_urls
from tba_cli.run_folder import RunFolder

CONSTANT = ("run", "data", "model.warm_start", *CONSTANT_SETTINGS)
"""Sections and keys that cannot change within a run: weights, prompts and rollouts were made with them."""
ABSENT = "not there"


class RecipeFile(StrictModel):
    """Where the recipe of a run came from."""

    document: dict[str, Any]
    """The file alone."""
    sets: list[str] = Field(default_factory=list)
    """`--set` and the flags like it, of the start and of every resume, in their order."""
    environ: dict[str, str] = Field(default_factory=dict)
    """`TBA_SECTION__KEY` variables of the start."""


def recipe_file_of(path: str | Path, sets: Sequence[str], environ: Mapping[str, str] | None = None) -> RecipeFile:
    """Return the source of a recipe, for a run that begins now to remember.

    Raises:
        ConfigError: the file cannot be read.
    """
    variables = {
        name: value
        for name, value in (os.environ if environ is None else environ).items()
        if name.startswith(ENV_PREFIX) and "__" in name
    }
    return RecipeFile(document=read_document(Path(path)), sets=list(sets), environ=variables)


def resume_recipe(
    folder: RunFolder,
    path: str | Path | None,
    sets: Sequence[str],
    *,
    take_changes: bool,
    on_difference: Callable[[str], None],
) -> tuple[Recipe, RecipeFile | None]:
    """Return the recipe that a run continues with: the one that it began with, plus `sets`.

    Args:
        path: the recipe file that was named; None: none was, or it is the run's own.
        sets: the overrides of this resume.
        take_changes: take the file as it is now, under the flags and variables of the start.
        on_difference: called with a line for each key that differs.

    Raises:
        ConfigError: the file has changed and `take_changes` is not given.
    """
    # the variables of the start are in it already; those of this shell may be for something else
    recipe = load_recipe(folder.recipe_path, sets=sets, environ={})
    began = _read(folder.recipe_file_path)
    # there is nothing to compare the file with
    if began is None:
        return recipe, None
    all_sets = [*began.sets, *sets]
    # recipe.json of the run is the resolved recipe: its form differs from that of the file
    now = began.document if path is None or _is_own(folder, path) else read_document(Path(path))
    if now == began.document:
        return recipe, began.model_copy(update={"sets": all_sets})
    for key, (before, after) in differences(began.document, now):
        on_difference(with_bare_urls(f"{path}: {key} was {before!r} when the run began, and is {after!r} now"))
    if not take_changes:
        own = [*this_program(), "run", os.path.relpath(folder.recipe_path)]
        raise ConfigError(
            f"recipe {path} has changed since run {recipe.run.name!r} began (see above); take the changes with "
            f"--take-changes, or continue as it began with: {shlex.join(own)} --resume"
        )
    taken = load_recipe(path or "", sets=all_sets, environ=began.environ)
    return taken, began.model_copy(update={"document": now, "sets": all_sets})


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
    """Check that no constant of the run has changed, by its file or by `--set`.

    Raises:
        ConfigError: one has; names the key and both values.
    """
    sections = {name.partition(".")[0] for name in CONSTANT}
    before, after = (recipe.model_dump(mode="json", include=sections) for recipe in (began, taken))
    for key, (old, new) in differences(before, after):
        if not any(f"{key}.".startswith(f"{name}.") for name in CONSTANT):
            continue
        raise ConfigError(
            f"{key} was {old!r} when run {began.run.name!r} began, and cannot become {new!r} within a run: set it "
            "back, or begin another run with --run-name"
        )


def _is_own(folder: RunFolder, path: str | Path) -> bool:
    return Path(path).absolute() == folder.recipe_path


def _read(path: Path) -> RecipeFile | None:
    """Return the recorded file, or None where the run began with a release that kept none."""
    try:
        return RecipeFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); remove it to skip the comparison") from None
