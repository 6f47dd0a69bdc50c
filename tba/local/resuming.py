"""What a resumed run goes on with: the recipe that it began with, and whether its file says something else by now.

runs/<name>/recipe_file.json    what the file said when the run began, with the flags and variables that came on top
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
from tba.config.recipe import CONSTANT_SETTINGS, ENV_PREFIX, read_document
from tba.errors import ConfigError
from tba.local.run_folder import RunFolder

CONSTANT = ("run", "data", "model.warm_start", *CONSTANT_SETTINGS)
"""Sections and keys that what is there was made with: weights, prompts, rollouts, and where they lie."""
ABSENT = "not there"


class RecipeFile(StrictModel):
    """Where the recipe of a run came from."""

    document: dict[str, Any]
    """The file alone."""
    sets: list[str] = Field(default_factory=list)
    """`--set` and the like, of the start and of every resume, in their order."""
    environ: dict[str, str] = Field(default_factory=dict)
    """`TBA_SECTION__KEY` variables of the start."""


def recipe_file_of(path: str | Path, sets: Sequence[str], environ: Mapping[str, str] | None = None) -> RecipeFile:
    """What a run that begins now remembers of its recipe.

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
    folder: RunFolder, path: str | Path | None, sets: Sequence[str], *, take_changes: bool, say: Callable[[str], None]
) -> tuple[Recipe, RecipeFile | None]:
    """The recipe that a run goes on with: the one that it began with, plus `sets`.

    Args:
        path: the recipe file that was named; None: none was, or it is the run's own.
        sets: of this resume.
        take_changes: go on with the file as it is now, under the flags and variables of the start.
        say: is told what differs.

    Raises:
        ConfigError: the file has changed and `take_changes` is not given.
    """
    recipe = load_recipe(folder.recipe_path, sets=sets, environ={})
    began = _read(folder.recipe_file_path)
    if began is None:
        return recipe, None
    all_sets = [*began.sets, *sets]
    now = began.document if path is None or _is_own(folder, path) else read_document(Path(path))
    if now == began.document:
        return recipe, began.model_copy(update={"sets": all_sets})
    for key, (before, after) in differences(began.document, now):
        say(f"{path}: {key} was {before!r} when the run began, and is {after!r} now")
    if not take_changes:
        own = [*this_program(), "run", os.path.relpath(folder.recipe_path)]
        raise ConfigError(
            f"recipe {path} has changed since run {recipe.run.name!r} began (see above); take the changes with "
            f"--take-changes, or go on as it began with: {shlex.join(own)} --resume"
        )
    taken = load_recipe(path or "", sets=all_sets, environ=began.environ)
    return taken, began.model_copy(update={"document": now, "sets": all_sets})


def this_program() -> list[str]:
    """The words that start this program again in this shell: `tba` is not always on PATH."""
    typed = sys.argv[0]
    if Path(typed).name != "tba":
        return [sys.executable, "-m", "tba.cli.main"]
    found = shutil.which("tba")
    return ["tba"] if found is not None and os.path.realpath(found) == os.path.realpath(typed) else [typed]


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Dotted keys in which two documents differ, with both values; `ABSENT` for a key that one of them lacks."""
    for key in sorted({*before, *after}):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", (old, new)


def check_constant(began: Recipe, taken: Recipe) -> None:
    """Refuse a change of what the run was made with, by its file or by `--set`.

    Raises:
        ConfigError: naming the key and both values.
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
    """None: the run began with a release that kept none."""
    try:
        return RecipeFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}); remove it, and it is not compared"
        ) from None
