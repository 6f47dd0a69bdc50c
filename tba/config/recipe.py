"""The recipe: one TOML file that describes a whole run, read by every service.

Precedence: defaults < file < environment (`TBA_BUFFER__PORT=8700`) < `--set buffer.port=8700`. Unknown keys are
refused everywhere, and the message names the key, the value and the place.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, model_validator

from tba.config.base import StrictModel
from tba.config.sections import (
    AuthSection,
    BufferSection,
    DataSection,
    EvalSection,
    LocalSection,
    ModelSection,
    RewardSection,
    RunSection,
    SamplingSection,
    SearcherSection,
    StoreSection,
)
from tba.config.training import ObjectiveSection, TrainerSection
from tba.errors import ConfigError

ENV_PREFIX = "TBA_"


class Recipe(StrictModel):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    buffer: BufferSection = BufferSection()
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection = RewardSection()
    searcher: SearcherSection = SearcherSection()
    objective: ObjectiveSection = ObjectiveSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    store: StoreSection = StoreSection()
    auth: AuthSection = AuthSection()
    local: LocalSection = LocalSection()
    log_format: Literal["auto", "console", "json"] = "auto"
    """Log lines: JSON, console, or console on a terminal and JSON otherwise."""

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if (self.data.generator is None) == (self.data.path is None):
            raise ValueError("data: give exactly one of `generator` (a built-in task) and `path` (JSONL or Parquet)")
        if self.run.fork_version is not None and self.run.snapshot is None:
            raise ValueError("run.fork_version names a version of the run in run.snapshot: give that too")
        if self.is_offline and self.sampling.alternate:
            raise ValueError("sampling.alternate takes turns with searchers, and searcher.num_searchers is 0")
        return self

    @property
    def is_offline(self) -> bool:
        """Whether nothing is generated: the run only trains on the snapshot that it begins with."""
        return self.searcher.num_searchers == 0

    @property
    def warm_start_seed(self) -> int:
        """The seed of a starting model made on this machine: its own, or the run's."""
        section = self.model.warm_start
        return self.run.seed if section is None or section.seed is None else section.seed

    @property
    def buffer_url(self) -> str:
        """Base URL of the buffer service."""
        return (self.buffer.url or f"http://{self.buffer.host}:{self.buffer.port}").rstrip("/")

    @property
    def reward_url(self) -> str:
        """Base URL of the reward service."""
        return (self.reward.url or f"http://{self.reward.host}:{self.reward.port}").rstrip("/")


def load_recipe(path: str | Path, *, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe from TOML, or a resolved config from JSON.

    Args:
        path: the file; `.json` is read as JSON, anything else as TOML.
        sets: `section.key=value` overrides; the value is TOML, or a bare string.
        environ: defaults to the process environment.

    Raises:
        ConfigError: the file is missing or unreadable, or a key or value is wrong.
    """
    document = _read(Path(path))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            _put(document, keys, _value(text), where=f"environment variable {name}")
    for item in sets:
        dotted, sep, text = item.partition("=")
        if not sep or "." not in dotted:
            raise ConfigError(f"--set {item!r} is not of the form section.key=value")
        _put(document, dotted.strip().split("."), _value(text), where=f"--set {item}")
    return parse_recipe(document, where=str(path))


def parse_recipe(document: Mapping[str, Any], *, where: str) -> Recipe:
    """Validate a recipe that is already a map.

    Raises:
        ConfigError: naming the first key that is wrong, its value and what to do.
    """
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_sentence(error)}") from None
    if recipe.model.warm_start is None:
        return recipe
    # one cached starting model per seed
    path = recipe.model.path.replace("{seed}", str(recipe.warm_start_seed))
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; recipes that ship with tba are in recipes/") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    try:
        text = raw.decode()
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid: {error}") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _put(document: dict[str, Any], keys: Sequence[str], value: Any, *, where: str) -> None:
    at: Any = document
    for key in keys[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise ConfigError(f"{where}: {key!r} is a value, not a section")
    at[keys[-1]] = value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    key = ".".join(loc) or "recipe"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(loc[-1], _known_keys(loc[:-1]), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; remove it or correct its name"
        return f"unknown key {key!r} (value {first['input']!r}){hint}{more}"
    if first["type"] == "missing":
        return f"key {key!r} is missing{more}"
    return f"key {key!r} has the value {first['input']!r}: {first['msg']}{more}"


def _known_keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in path:
        field = model.model_fields.get(part)
        inner = None if field is None else _model_of(field.annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for m in map(_model_of, getattr(annotation, "__args__", ())) if m), None)
