"""Write an objective, scorers, an environment and prompts that a run gets from Python to files beside the run.

runs/.python/<name>/recipe.json      the recipe that names the other files
                    prompts.jsonl    the prompts
                    <name>.toml rows.jsonl scorer.py    as of `tba init`, where the recipe was fitted to a model
                    own_<name>.py    a function or class that was defined in a notebook or script
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tba.api import Prompt
from tba.config import Recipe, load_recipe
from tba.config.recipe_file import explain_validation_error, read_document
from tba.errors import ConfigError
from tba_cli.doctor.checks.machine import this_machine
from tba_cli.local.launch import run_folder_of
from tba_cli.prompts.reader import prompts_of
from tba_cli.run_folder import RunFolder
from tba_cli.scripting.own_functions import named
from tba_cli.setup.model_recipe import PROMPT_COLUMNS, check_task_name, model_task_files
from tba_cli.shipped_recipes import recipe_path

BESIDE = ".python"
"""A folder beside the run folders, because a run that starts over deletes everything in its own folder."""
PROMPTS_FILE, ROWS_FILE, RECIPE_FILE = "prompts.jsonl", "rows.jsonl", "recipe.json"
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
    recipe: RecipeLike | None,
    *,
    model: str | os.PathLike[str] | None = None,
    name: str | None = None,
    lora: bool | None = None,
    objective: Function | str | None = None,
    rewards: Iterable[Function | Mapping[str, Any]] | None = None,
    environment: Function | str | None = None,
    tools: Iterable[Function | str] | None = None,
    prompts: Any = None,
    sets: Sequence[str] = (),
    resume: bool = False,
    fresh: bool = False,
) -> Inputs:
    """Check the arguments of `tba.run`, and write recipe, prompts and functions to files for the services."""
    if (recipe is None) == (model is None) or (model is None and lora is not None):
        raise ConfigError("give either a recipe, or model and prompts, to which one is fitted; lora goes with model")
    files: dict[str, str] = {}
    import_folders: list[str] = []
    tasks: list[str] = []
    scorers = None if rewards is None else _scorers_of(rewards, files, import_folders)
    episodes = _episodes_of(environment, tools, files, import_folders)
    if recipe is None:
        model = os.fspath(model or "")
        # a run or a model may be called what no task is
        task = re.sub("[^a-z0-9_-]+", "-", (name or Path(model).absolute().name).lower()).lstrip("0123456789_-")[:41]
        check_task_name(task)
        # before half a minute of measuring; these alone say where the run will be
        stand_in = {"run": {"name": task}, "model": {"path": "."}, "data": {"generator": "addition"}}
        place_sets = [item for item in sets if item.startswith(("run.", "local."))]
        run_folder_of(_resolved(stand_in, place_sets)).check(resume=resume, fresh=fresh)
        files |= _fitted(task, model, prompts, scorers=scorers, lora=lora, episodes=episodes)
        document = tomllib.loads(files[f"{task}.toml"])
    elif isinstance(recipe, Mapping):
        try:
            document = json.loads(json.dumps(recipe, default=os.fspath))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"recipe cannot be written as JSON: {error}; give values that TOML has too") from None
    else:
        try:
            path = recipe_path(os.fspath(recipe))
        except argparse.ArgumentTypeError as error:
            raise ConfigError(str(error)) from None
        document = read_document(Path(path))
        if objective is None and rewards is None and prompts is None and not episodes:
            return Inputs(recipe=path, folder=run_folder_of(load_recipe(path, sets=sets)))
    # first: tasks come from the prompts
    if prompts is not None and recipe is not None:
        rows = [_checked(row, number) for number, row in enumerate(_rows_of(prompts))]
        files[PROMPTS_FILE] = "".join(f"{json.dumps(row)}\n" for row in rows)
        kept = {key: value for key, value in document.get("data", {}).items() if key not in SOURCES}
        document["data"] = {**kept, "path": PROMPTS_FILE}
        tasks = sorted({row["task"] for row in rows})
    if isinstance(objective, str):
        document["objective"] = {**document.get("objective", {}), "preset": objective}
    elif objective is not None:
        preset = _take(objective, "objective", files, import_folders)
        document["objective"] = {**document.get("objective", {}), "preset": preset}
    if (scorers is not None or episodes) and recipe is not None:
        if not tasks:
            # of a section that these overrides are for, the environment is not there yet
            resolved = _resolved(document, [item for item in sets if not item.startswith("environments.")])
            # data sets need not be read to know it
            of_sets = {part.task for part in resolved.data.sets}
            tasks = sorted(of_sets or {prompt.task for prompt in prompts_of(resolved)})
        if scorers is not None:
            section = document.setdefault("reward", {})
            section["tasks"] = {**section.get("tasks", {}), **{task: {"scorers": scorers} for task in tasks}}
        if episodes:
            section = document.setdefault("environments", {})
            section |= {task: {**section.get(task, {}), **episodes} for task in tasks}
    folder = run_folder_of(_resolved(document, sets))
    place = _make_place(folder, resume=resume, fresh=fresh)
    if recipe is None:
        document["data"]["sets"][0]["dataset"] = str(place / ROWS_FILE)
    elif prompts is not None:
        document["data"]["path"] = str(place / PROMPTS_FILE)
    files[RECIPE_FILE] = json.dumps(document, indent=2) + "\n"
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    return Inputs(
        recipe=str(place / RECIPE_FILE), folder=folder, import_folders=[str(place), *dict.fromkeys(import_folders)]
    )


def _fitted(task: str, model: str, prompts: Any, *, episodes: dict[str, Any], **given: Any) -> dict[str, str]:
    """Return the files of `tba init --model --data`, with a recipe that fits model, rows and machine."""
    lines = []
    for number, row in enumerate(_rows_of(prompts)):
        if episodes and isinstance(row, Mapping):
            # an episode is a conversation, and the text of a row its first message
            column = next((name for name in PROMPT_COLUMNS if isinstance(row.get(name), str)), None)
            row = row if column is None else {**row, column: [{"role": "user", "content": row[column]}]}
        try:
            lines.append(f"{json.dumps(dict(row), allow_nan=False)}\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"prompts[{number}] cannot be written as JSON ({error}); leave the value out") from None
    if not lines:
        raise ConfigError("prompts holds no rows; give at least two")
    with tempfile.TemporaryDirectory(prefix="tba-inputs-") as place:
        path = Path(place) / ROWS_FILE
        path.write_text("".join(lines), encoding="utf-8")
        try:
            return model_task_files(task, model, path, this_machine(), episodes=episodes, **given)
        except ConfigError as error:
            pattern = rf"file {re.escape(str(path))}, line (\d+)"
            raise ConfigError(re.sub(pattern, lambda at: f"prompts[{int(at[1]) - 1}]", str(error))) from None


def _rows_of(prompts: Any) -> Iterable[Any]:
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        hint = "; name one split of it" if isinstance(prompts, Mapping) else ""
        raise ConfigError(f"prompts is a {type(prompts).__name__}; give a list of dicts, or a datasets.Dataset{hint}")
    return prompts


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


def _episodes_of(
    environment: Function | str | None,
    tools: Iterable[Function | str] | None,
    files: dict[str, str],
    import_folders: list[str],
) -> dict[str, Any]:
    """Return the keys of [environments.TASK] that are given."""
    found: dict[str, Any] = {}
    if environment is not None:
        is_name = isinstance(environment, str)
        types = {"may_be_class": True, "needs_types": True}
        taken = environment if is_name else _take(environment, "environment", files, import_folders, **types)
        found["environment"] = taken
    if tools is not None:
        if callable(tools) or isinstance(tools, str):
            raise ConfigError("tools is one tool; give a list of them: tools=[...]")
        found["tools"] = [
            tool if isinstance(tool, str) else _take(tool, f"tools[{number}]", files, import_folders, needs_types=True)
            for number, tool in enumerate(tools)
        ]
        if not found["tools"]:
            raise ConfigError("tools is empty; give at least one, or leave it out")
    return found


def _take(function: Function, what: str, files: dict[str, str], import_folders: list[str], **kinds: bool) -> str:
    """Return a function's import path; add its source or folder to `files` or `import_folders`. `what`: for errors."""
    found = named(function, what=what, **kinds)
    if found.source is not None and files.setdefault(found.file_name, found.source) != found.source:
        raise ConfigError(f"{what}: another function is called {function.__name__!r} too; rename one of them")
    import_folders += found.import_folders
    return found.path


def _checked(row: Any, number: int) -> dict[str, Any]:
    try:
        checked = Prompt.model_validate(row).document()
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
