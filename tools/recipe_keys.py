"""Find all keys that a recipe may have, and those that no shipped recipe, deployment or study sets.

A key is a leaf of the recipe's models, named by its path. Keys of maps (tasks, columns) and indices of lists are left
out. Fields of the same name below one path are one key: `reward.tasks.scorers.pattern` is the field of every kind.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from tba.config import Recipe
from tba_cli.task_files import task_files

SETTING = re.compile(r"\bTBA_([A-Z0-9]+(?:_[A-Z0-9]+)*(?:__[A-Z0-9]+(?:_[A-Z0-9]+)*)+)\b")
RECIPES = ("recipes/*.toml", "examples/worlds/**/*.toml")
DEPLOYMENTS = ("*.yml", "deploy/**/*.yml", "charts/**/*.yaml", "charts/**/*.tpl")
"""Compose files and the chart, whose settings are environment variables."""
DOTTED = re.compile(r"\b[a-z_0-9]+(?:\.[a-z_0-9]+)+\b")
STUDIES = ("Makefile", "studies/**/*.py")
"""Commands and arms of studies, which name a key by its path."""
INIT = "tba_cli/task_files.py"
"""The recipe that `tba init` writes."""


def all_keys() -> set[str]:
    """Return every key of a recipe."""
    return set(_leaves(Recipe, ""))


def unset_keys(root: Path) -> set[str]:
    """Return the keys that no recipe, no Compose file, no file of the chart and no study sets."""
    found = all_keys()
    if (root / INIT).is_file():
        found -= keys_of(tomllib.loads(task_files("task")["task.toml"]))
    for pattern in RECIPES:
        for path in root.glob(pattern):
            found -= keys_of(tomllib.loads(path.read_text(encoding="utf-8")))
    for pattern in DEPLOYMENTS:
        for path in root.glob(pattern):
            found -= _with_values(settings(path.read_text(encoding="utf-8")))
    for pattern in STUDIES:
        for path in root.glob(pattern):
            found -= _with_values(DOTTED.findall(path.read_text(encoding="utf-8")))
    return found


def _with_values(names: Iterable[str]) -> set[str]:
    # a schedule may be written as a number
    return {key for name in names for key in (name, f"{name}.value")}


def keys_of(document: Mapping[str, Any]) -> set[str]:
    """Return the keys that a recipe sets."""
    return set(_set(Recipe, document, ""))


def settings(text: str) -> set[str]:
    """Return the keys whose environment variables (TBA_SECTION__KEY) a text names."""
    return {name.lower().replace("__", ".") for name in SETTING.findall(text)}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation holds, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        if not inner:
            yield prefix + name
        for child in inner:
            yield from _leaves(child, f"{prefix}{name}.")


def _set(annotation: Any, value: Any, prefix: str) -> Iterator[str]:
    """Yield the keys that `value` sets in a field with this annotation; `prefix` is the path of the field."""
    models = list(_models(annotation))
    if not models:
        yield prefix.removesuffix(".")
    elif isinstance(value, list):
        for item in value:
            yield from _set(annotation, item, prefix)
    elif isinstance(value, Mapping) and (named := _values_of_map(annotation)) is not None:
        for item in value.values():
            yield from _set(named, item, prefix)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            for model in models:
                if key in model.model_fields:
                    yield from _set(model.model_fields[key].annotation, item, f"{prefix}{key}.")
    else:  # a short form: a number for a schedule, a name for a column
        whole = TypeAdapter(annotation).validate_python(value)
        yield from (prefix + name for name in getattr(whole, "model_fields_set", ()))


def _values_of_map(annotation: Any) -> Any:
    """Return the annotation of the values of a dict annotation; None if there is no dict in it."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    found = (_values_of_map(inner) for inner in typing.get_args(annotation))
    return next((values for values in found if values is not None), None)
