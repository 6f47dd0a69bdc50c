"""Read and validate a recipe: one TOML file that describes a whole run.

Precedence: defaults < file < environment (`TBA_BUFFER__PORT=8700`) < `--set buffer.port=8700`.
Unknown keys are refused everywhere; the message names the key, the value and the place.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tba.config.data import PrepareItem
from tba.config.recipe import Recipe
from tba.errors import ConfigError, did_you_mean
from tba.fields import own_words
from tba.tls import with_bare_urls

ENV_PREFIX = "TBA_"
HUB_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""ORG/NAME."""


def load_recipe(
    path: str | Path,
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    stand_ins: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe from TOML, or a resolved config from JSON.

    Args:
        path: the file; `.json` is read as JSON, anything else as TOML.
        sets: overrides, `section.key=value`, or `section.N.key=value` for item N of an array. The value is TOML or a
            bare string.
        environ: environment variables; default: those of this process.
        stand_ins: sections that the caller does not use; each takes the place of one that the file lacks.

    Raises:
        ConfigError: the file is missing or unreadable, or a key or value is wrong.
    """
    document = read_document(Path(path))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            # two underscores part section and key, since keys have single ones
            _set(document, keys, parse_toml_value(text), where=f"environment variable {name}")
    for item in sets:
        dotted, sep, text = item.partition("=")
        if not sep or "." not in dotted:
            raise ConfigError(f"--set {item!r} is not of the form section.key=value")
        _set(document, dotted.strip().split("."), parse_toml_value(text), where=f"--set {item}")
    recipe = parse_recipe({**(stand_ins or {}), **document}, where=str(path))
    # TRL's files of settings lie in the recipe's folder
    folder, prepare = Path(path).absolute().parent, []
    for item in recipe.prepare:
        files = {"trl_sft": item.trl_sft, "trl_reward": item.trl_reward}
        found = {name: str(folder / file) for name, file in files.items() if file is not None}
        prepare.append(item.model_copy(update=found))
    return _with_hub_model(recipe.model_copy(update={"prepare": prepare}))


def _with_hub_model(recipe: Recipe) -> Recipe:
    """Turn `model.path = "org/name"`, unless it is a folder, into a `[[prepare]]` item that `tba run` downloads."""
    section = recipe.model
    is_folder = (
        section.warm_start is not None
        # `tba data prepare` makes the folders below models/, which need not be there yet
        or section.path.startswith("models/")
        or Path(section.path).is_dir()
        or any(item.path == section.path for item in recipe.prepare)
    )
    if is_folder or not HUB_MODEL.fullmatch(section.path):
        if section.revision is not None:
            raise ConfigError(
                f"model.revision is {section.revision!r}, and model.path {section.path!r} is a folder, which has none; "
                "remove the revision, or give ORG/NAME on the hub as model.path"
            )
        return recipe
    item = PrepareItem(
        path=f"models/{section.path}", kind="model", hub=section.path, revision=section.revision, at_start=True
    )
    model = section.model_copy(update={"path": item.path, "revision": None})
    others = [other for other in recipe.prepare if other.path != item.path]
    return recipe.model_copy(update={"model": model, "prepare": [item, *others]})


def parse_recipe(document: Mapping[str, Any], *, where: str) -> Recipe:
    """Validate a recipe that has been parsed into a map; `where` names its origin in errors.

    Raises:
        ConfigError: a key or value is wrong; the message names the first one, its value and the remedy.
    """
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain_validation_error(error, Recipe)}") from None
    if recipe.model.warm_start is None:
        return recipe
    # the starting model is cached per seed
    path = recipe.model.path.replace("{seed}", str(recipe.run.seed))
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})


def read_document(path: Path) -> dict[str, Any]:
    """Read a recipe file without validation."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; `tba run quickstart` runs one that ships with tba") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    try:
        text = raw.decode()
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(document, dict):
            raise ConfigError(f"recipe {path} is not valid: it has no sections")
        return document
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid: {error}") from None


def parse_toml_value(text: str) -> Any:
    """Parse a typed value as TOML; text that is not TOML is returned as a string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _set(document: dict[str, Any], keys: Sequence[str], value: Any, *, where: str) -> None:
    at: Any = document
    for place, key in enumerate(keys):
        if isinstance(at, list) and not (key.isdecimal() and int(key) < len(at)):
            raise ConfigError(
                f"{where}: {key!r} is no item of {keys[place - 1]!r}, which has {len(at)}, numbered from 0"
            )
        if not isinstance(at, list | dict):
            raise ConfigError(f"{where}: {keys[place - 1]!r} is a value, not a section")
        index: Any = int(key) if isinstance(at, list) else key
        if place == len(keys) - 1:
            at[index] = value
        else:
            at = at[index] if isinstance(at, list) else at.setdefault(index, {})


def explain_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Return a sentence about the first wrong key of a document of this model: the key, its value and the remedy."""
    # a misspelt key may be missing under its right name, too
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    first, loc = errors[0], [str(part) for part in errors[0]["loc"]]
    key = ".".join(loc)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = own_words(first["msg"])
    if not loc:  # a rule between sections names its keys and values itself
        return f"{message}{more}"
    if first["type"] == "extra_forbidden":
        names = [name for name in _names_in(model) if name != loc[-1]]
        hint = did_you_mean(loc[-1], names) or "; remove it or correct its name"
        # the message goes to logs, and a misspelt key may hold a secret
        is_secret = isinstance(first["input"], str) and re.search(r"password|secret|token|credential", loc[-1], re.I)
        return f"unknown key {key!r} (value {'not shown' if is_secret else _shown(first['input'])}){hint}{more}"
    if first["type"] == "missing":
        return f"key {key!r} is missing{more}"
    # so does the rule of a section
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"{key}: {message}{more}"
    context = first.get("ctx", {})
    if first["type"] == "union_tag_invalid":
        message = f"kind is {context['tag']!r}, and it is one of {context['expected_tags']}"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        message += did_you_mean(first["input"], re.findall(r"'([^']+)'", context["expected"]))
    return f"key {key!r} has the value {_shown(first['input'])}: {message}{more}"


def _shown(value: Any) -> str:
    # a URL without its scheme is not seen as one, and may hold a password all the same
    text = repr(with_bare_urls(value))
    return "that is not shown, since it has an @" if "@" in text else text


def _names_in(annotation: Any) -> list[str]:
    """Return the field names of all models in a type, and recursively those of the models in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        return [*fields, *(name for field in fields.values() for name in _names_in(field.annotation))]
    return [name for inner in get_args(annotation) for name in _names_in(inner)]
