"""Write an objective, scorers and prompts that a run gets from Python to files beside the run.

runs/.python/<name>/recipe.json      the recipe that names the other files
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
"""A folder beside the run folders, because a run that starts over deletes everything in its own folder."""
PROMPTS_FILE, RECIPE_FILE = "prompts.jsonl", "recipe.json"
SOURCES = ("generator", "path", "sets")
"""Keys of [data] that say where prompts come from."""
Function = Callable[..., Any]
RecipeLike = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files to start a run with."""

    recipe: str
    """The path of the recipe."""
    folder: RunFolder
    """The folder that the run will have."""
    import_folders: list[str] = field(default_factory=list)
    """The folders from which services import the functions."""


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
    """Check the arguments of `tba.run`, and write recipe, prompts and functions to files for the services."""
    if isinstance(recipe, Mapping):
        try:
            document: dict[str, Any] = json.loads(json.dumps(recipe, default=os.fspath))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"recipe cannot be written as JSON: {error}; give values that TOML has too") from None
    else:
        try:
            path = recipe_path(os.fspath(recipe))
        except argparse.ArgumentTypeError as error:
            raise ConfigError(str(error)) from None
        document = read_document(Path(path))
        if objective is None and rewards is None and prompts is None:
            return Inputs(recipe=path, folder=run_folder_of(load_recipe(path, sets=sets)))
    files: dict[str, str] = {}
    import_folders: list[str] = []
    tasks: list[str] = []
    # first: tasks come from the prompts
    if prompts is not None:
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            hint = "; name one split of it" if isinstance(prompts, Mapping) else ""
            kind = type(prompts).__name__
            raise ConfigError(f"prompts is a {kind}; give a list of dicts, or a datasets.Dataset{hint}")
        rows = [_checked(row, number) for number, row in enumerate(prompts)]
        files[PROMPTS_FILE] = "".join(f"{json.dumps(row)}\n" for row in rows)
        kept = {key: value for key, value in document.get("data", {}).items() if key not in SOURCES}
        document["data"] = {**kept, "path": PROMPTS_FILE}
        tasks = sorted({row["task"] for row in rows})
    if isinstance(objective, str):
        document["objective"] = {**document.get("objective", {}), "preset": objective}
    elif objective is not None:
        preset = _take(objective, "objective", files, import_folders)
        document["objective"] = {**document.get("objective", {}), "preset": preset}
    if rewards is not None:
        scorers = _scorers_of(rewards, files, import_folders)
        section = document.setdefault("reward", {})
        if not tasks:
            resolved = _resolved(document, sets)
            # data sets need not be read to know it
            of_sets = {part.task for part in resolved.data.sets}
            tasks = sorted(of_sets or {prompt.task for prompt in prompts_of(resolved)})
        section["tasks"] = {**section.get("tasks", {}), **{task: {"scorers": scorers} for task in tasks}}
    folder = run_folder_of(_resolved(document, sets))
    place = _make_place(folder, resume=resume, fresh=fresh)
    if prompts is not None:
        document["data"]["path"] = str(place / PROMPTS_FILE)
    files[RECIPE_FILE] = json.dumps(document, indent=2) + "\n"
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    return Inputs(
        recipe=str(place / RECIPE_FILE), folder=folder, import_folders=[str(place), *dict.fromkeys(import_folders)]
    )


def _resolved(document: dict[str, Any], sets: Sequence[str]) -> Recipe:
    with tempfile.TemporaryDirectory(prefix="tba-inputs-") as name:
        path = Path(name) / RECIPE_FILE
        path.write_text(json.dumps(document), encoding="utf-8")
        return load_recipe(path, sets=sets)


def _scorers_of(
    rewards: Iterable[Function | Mapping[str, Any]], files: dict[str, str], import_folders: list[str]
) -> list[dict[str, Any]]:
    if callable(rewards) or isinstance(rewards, Mapping):
        raise ConfigError("rewards is one scorer; give a list of them: rewards=[...]")
    scorers = []
    for number, reward in enumerate(rewards):
        if isinstance(reward, Mapping):
            scorers.append(dict(reward))
        else:
            function = _take(reward, f"rewards[{number}]", files, import_folders)
            scorers.append({"kind": "python", "function": function})
    if not scorers:
        raise ConfigError("rewards is empty; give at least one scorer, or leave it out for those of the recipe")
    return scorers


def _take(function: Function, what: str, files: dict[str, str], import_folders: list[str]) -> str:
    """Return a function's import path; add its source or folder to `files` or `import_folders`. `what`: for errors."""
    found = named(function, what=what)
    if found.source is not None and files.setdefault(found.file_name, found.source) != found.source:
        raise ConfigError(f"{what}: another function is called {function.__name__!r} too; rename one of them")
    if found.import_folder is not None:
        import_folders.append(found.import_folder)
    return found.path


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


def _make_place(folder: RunFolder, *, resume: bool, fresh: bool) -> Path:
    """Create and return the private folder for the files; unless the run resumes, delete its old files."""
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
