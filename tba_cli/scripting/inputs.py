"""What a run gets from Python besides a recipe: an objective, scorers, prompts; written as files beside the run.

runs/.python/<name>/recipe.json      the recipe that names what follows
                    prompts.jsonl    the prompts
                    own_<name>.py    a function that was defined in a notebook or script
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tba.api import Prompt
from tba.config import Recipe, load_recipe
from tba.config.recipe_file import explain_validation_error, read_document
from tba.errors import ConfigError
from tba_cli.local.launch import run_folder_of
from tba_cli.prompts.reader import prompts_of
from tba_cli.run_folder import RunFolder
from tba_cli.scripting.own_functions import named
from tba_cli.shipped_recipes import recipe_path

BESIDE = ".python"
"""Folder beside the run folders: a run that begins anew deletes all that is in its own."""
PROMPTS_FILE, RECIPE_FILE = "prompts.jsonl", "recipe.json"
SOURCES = ("generator", "path", "sets")
"""Keys of [data] that say where prompts come from."""
Function = Callable[..., Any]
RecipeLike = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """How to start a run."""

    recipe: str
    """The path of the recipe."""
    folder: RunFolder
    """The folder that the run will have."""
    import_folders: list[str] = field(default_factory=list)
    """Where services find the functions."""


def prepare(
    recipe: RecipeLike,
    *,
    objective: Function | str | None,
    rewards: Iterable[Function | Mapping[str, Any]] | None,
    prompts: Any,
    sets: Sequence[str],
    resume: bool,
    fresh: bool,
) -> Inputs:
    """Check what was given, and write what the services have to find.

    Args:
        sets: the overrides, the name of the run among them.

    Raises:
        ConfigError: something is wrong with the recipe, a function or a prompt; or the run folder does not fit `resume`
            and `fresh`, or is in use.
    """
    if isinstance(recipe, Mapping):
        document, path = _copy_of(recipe), None
    else:
        path = _path_of(recipe)
        document = read_document(Path(path))
    if path is not None and objective is None and rewards is None and prompts is None:
        return Inputs(recipe=path, folder=run_folder_of(load_recipe(path, sets=sets)))
    with tempfile.TemporaryDirectory(prefix="tba-inputs-") as name:
        draft = _Draft(Path(name), document, sets)
        # first: tasks come from the prompts
        if prompts is not None:
            draft.take_prompts(prompts)
        if objective is not None:
            draft.take_objective(objective)
        if rewards is not None:
            draft.take_rewards(rewards)
        folder = run_folder_of(draft.recipe())
        place = _make_place(folder, resume=resume, fresh=fresh)
        draft.write_to(place)
    return Inputs(
        recipe=str(place / RECIPE_FILE),
        folder=folder,
        import_folders=[str(place), *dict.fromkeys(draft.import_folders)],
    )


class _Draft:
    """A recipe that becomes complete, with its files, in a temporary folder."""

    def __init__(self, folder: Path, document: dict[str, Any], sets: Sequence[str]) -> None:
        self._folder, self._document, self._sets = folder, document, sets
        self._tasks: list[str] | None = None
        self.import_folders: list[str] = []

    def recipe(self) -> Recipe:
        """Return it as it is now, resolved."""
        self._write_recipe()
        return load_recipe(self._folder / RECIPE_FILE, sets=self._sets)

    def take_prompts(self, prompts: Any) -> None:
        section: dict[str, Any] = self._document.get("data", {})
        rows = [_checked(row, number) for number, row in enumerate(_rows_of(prompts))]
        path = self._folder / PROMPTS_FILE
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        kept = {key: value for key, value in section.items() if key not in SOURCES}
        self._document["data"] = {**kept, "path": str(path)}
        self._tasks = sorted({row["task"] for row in rows})

    def take_objective(self, objective: Function | str) -> None:
        name = objective if isinstance(objective, str) else self._take(objective, what="objective")
        self._document["objective"] = {**self._document.get("objective", {}), "preset": name}

    def take_rewards(self, rewards: Iterable[Function | Mapping[str, Any]]) -> None:
        if callable(rewards) or isinstance(rewards, Mapping):
            raise ConfigError("rewards is one scorer; give a list of them: rewards=[...]")
        scorers = []
        for number, reward in enumerate(rewards):
            if isinstance(reward, Mapping):
                scorers.append(dict(reward))
                continue
            scorers.append({"kind": "python", "function": self._take(reward, what=f"rewards[{number}]")})
        if not scorers:
            raise ConfigError("rewards is empty; give at least one scorer, or leave it out for those of the recipe")
        tasks = self._tasks or _tasks_of(self.recipe())
        section = self._document.get("reward", {})
        entries = {task: {"scorers": scorers} for task in tasks}
        self._document["reward"] = {**section, "tasks": {**section.get("tasks", {}), **entries}}

    def write_to(self, place: Path) -> None:
        """Move the files there."""
        data = self._document.get("data", {})
        if self._tasks is not None:
            data["path"] = str(place / PROMPTS_FILE)
        self._write_recipe()
        shutil.copytree(self._folder, place, dirs_exist_ok=True)

    def _take(self, function: Function, *, what: str) -> str:
        found = named(function, what=what)
        if found.source is not None:
            file = self._folder / found.file_name
            if file.exists() and file.read_text(encoding="utf-8") != found.source:
                raise ConfigError(f"{what}: another function is called {function.__name__!r} too; rename one of them")
            file.write_text(found.source, encoding="utf-8")
        if found.import_folder is not None:
            self.import_folders.append(found.import_folder)
        return found.path

    def _write_recipe(self) -> None:
        (self._folder / RECIPE_FILE).write_text(json.dumps(self._document, indent=2) + "\n", encoding="utf-8")


def _rows_of(prompts: Any) -> Iterable[Any]:
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        hint = "; name one split of it" if isinstance(prompts, Mapping) else ""
        raise ConfigError(f"prompts is a {type(prompts).__name__}; give a list of dicts, or a datasets.Dataset{hint}")
    return prompts


def _copy_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(recipe, default=os.fspath))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"recipe cannot be written as JSON: {error}; give values that TOML has too") from None


def _checked(row: Any, number: int) -> dict[str, Any]:
    try:
        checked = Prompt.model_validate(row).model_dump(mode="json")
        json.dumps(checked, allow_nan=False)
    except ValidationError as error:
        raise ConfigError(
            f"prompts[{number}]: {explain_validation_error(error, Prompt)}; a row is "
            '{"prompt_id": ..., "task": ..., "text": ..., "data": {...}, "split": "train" or "heldout"}'
        ) from None
    except ValueError as error:
        raise ConfigError(f"prompts[{number}] cannot be written as JSON ({error}); leave the value out") from None
    return checked


def _path_of(recipe: str | os.PathLike[str]) -> str:
    try:
        return recipe_path(os.fspath(recipe))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def _tasks_of(recipe: Recipe) -> list[str]:
    data = recipe.data
    if data.sets:  # data sets need not be read to know it
        return sorted({section.task for section in data.sets})
    return sorted({prompt.task for prompt in prompts_of(recipe)})


def _make_place(folder: RunFolder, *, resume: bool, fresh: bool) -> Path:
    """Return the folder for the files, private and without those of an older run."""
    folder.check(resume=resume, fresh=fresh)
    if folder.is_in_use:
        # its services may still read them
        raise ConfigError(f"run {folder.path.name!r} is in progress; wait for its end, stop it, or give another name")
    place = folder.path.parent / BESIDE / folder.path.name
    if not resume:
        shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    return place
