"""The folders that a recipe requires, and the services that read each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from tba.config import Recipe
from tba.config.reward import RedteamSpec, RewardModelSpec
from tba.errors import ConfigError
from tba_cli.artifacts.prepared import training_inputs

Kind = Literal["model", "dataset"]
Service = Literal["buffer", "reward", "searcher", "setup", "trainer"]
KIND_PREFIXES: dict[Kind, str] = {"model": "models", "dataset": "datasets"}
"""First part of the keys of each kind in the store."""
_HOMES: dict[Kind, str] = {"model": "models", "dataset": "data"}
"""For each kind the folder after which the name in the store begins: `/data/models/A/B` is the model `A/B`."""
_NAME_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class RequiredFolder:
    """A folder that the recipe names."""

    kind: Kind
    path: str
    """The path as in the recipe: absolute, or relative to the current folder of the service."""
    key: str
    """The place in the recipe that names the folder, for messages."""
    services: frozenset[Service]
    """The services that read it."""

    @property
    def name(self) -> str:
        """Its name in the store (see `name_of`)."""
        return name_of(self.path, self.kind)

    @property
    def is_here(self) -> bool:
        """Whether its path is a folder that is not empty."""
        folder = Path(self.path).expanduser()
        return folder.is_dir() and any(folder.iterdir())


def name_of(path: str, kind: Kind) -> str:
    """Return the name of a folder in the store: the path after `models/` (a data set: `data/`), else its last part."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", ".", "~")]
    # machines keep models in different places; the part behind `models/` is the same on all of them
    home = _HOMES[kind]
    if home in parts[:-1]:
        # the last `models/` of the path: a folder above it may be called so too
        parts = parts[len(parts) - parts[::-1].index(home) :]
    else:
        parts = parts[-1:]
    name = "/".join(parts)
    # `files` would collide with the keys of a folder's files: models/NAME/files/SHA256
    if not all(_NAME_PART.fullmatch(part) for part in parts) or "files" in parts or len(name) > 200:
        raise ConfigError(
            f"{kind} folder {path!r} cannot be kept in the store under the name {name!r}: use parts of letters, digits "
            "and . _ = + @ -, joined by slashes, none of them called `files`; rename the folder"
        )
    return name


def required_folders(recipe: Recipe, service: Service | None = None) -> list[RequiredFolder]:
    """Return the folders that the recipe names, each once, without folders that only serve to make a model.

    A reward model is a folder if `[[prepare]]` makes it, if its name begins with `models/`, or if the name cannot be a
    hub repository (`OWNER/NAME`). The reward service downloads any other reward model itself.

    Args:
        service: return only the folders that this service reads; `setup` reads the data sets, for their prompts.
    """
    found: dict[str, RequiredFolder] = {}
    for folder in _named(recipe):
        before = found.get(folder.path)
        services = folder.services | (before.services if before is not None else frozenset())
        key = folder.key if before is None else before.key
        found[folder.path] = RequiredFolder(folder.kind, folder.path, key, services)
    paths: dict[tuple[Kind, str], str] = {}
    for folder in found.values():
        other = paths.setdefault((folder.kind, folder.name), folder.path)
        # one would silently replace the other in the store
        if other != folder.path:
            raise ConfigError(
                f"{folder.path} and {other} are both called {folder.name!r} in the store; give one of them another name"
            )
    return [folder for folder in found.values() if service is None or service in folder.services]


def _named(recipe: Recipe) -> Iterator[RequiredFolder]:
    # searchers get the starting model as a published version, not from this folder
    yield RequiredFolder("model", recipe.model.path, "model.path", frozenset({"trainer"}))
    if recipe.eval.embedding_model is not None:
        path = recipe.eval.embedding_model
        yield RequiredFolder("model", path, "eval.embedding_model", frozenset({"searcher"}))
    made = {item.path for item in recipe.prepare}
    for task, reward in recipe.reward.tasks.items():
        for spec in reward.scorers:
            paths = [spec.model] if isinstance(spec, RewardModelSpec) else []
            if isinstance(spec, RedteamSpec):
                paths = [spec.victim, spec.classifier]
            for path in paths:
                if path in made or not is_hub_name(path):
                    yield RequiredFolder("model", path, f"reward.tasks.{task}", frozenset({"reward"}))
    inputs = training_inputs(recipe)
    for item in recipe.prepare:
        if item.path in inputs:
            continue
        services: frozenset[Service] = frozenset({"setup"}) if item.kind == "dataset" else frozenset()
        yield RequiredFolder(item.kind, item.path, "[[prepare]]", services)


def is_hub_name(name: str) -> bool:
    """Return whether the text may name a repository of the Hugging Face hub, and is not below `models/`."""
    return _HUB_NAME.fullmatch(name) is not None and not name.startswith("models/")
