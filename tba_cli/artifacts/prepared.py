"""The folders that must be there before a run: whether each is there and holds what the recipe asks for.

PATH/.tba-prepare     JSON, written last: where the content came from

A folder without such a file belongs to a person, and is taken as it is. What only serves to make a model is not needed
where that model is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.config.data import PrepareItem
from tba.errors import ConfigError

RECORD = ".tba-prepare"
HALF_DONE = ".tba-prepare.partial"
"""File in a folder that is being fetched, JSON: what is fetched."""


def is_there(item: PrepareItem) -> bool:
    """Return whether the folder is there and whole.

    Raises:
        ConfigError: it holds something else than the recipe asks for; nothing that exists is overwritten.
    """
    folder = Path(item.path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{item.path} is a file, and must be a folder; remove it")
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    if (folder / HALF_DONE).exists():
        half_of = _read_half(folder)
        # to continue would mix the files of two things in one folder
        if half_of is not None and half_of != item.origin:
            raise ConfigError(
                f"{item.path} holds a part of {_describe(half_of)}, and the recipe asks for {_describe(item.origin)}; "
                "remove that folder"
            )
        return False
    record = read_record(folder)
    is_comparable = item.trl_file is None or item.origin["settings_sha256"] is not None
    if item.manual is None and record is not None and is_comparable and record["origin"] != item.origin:
        raise ConfigError(
            f"{item.path} holds {_describe(record['origin'])}, and the recipe asks for {_describe(item.origin)}; "
            "remove that folder, or give the item of [[prepare]] another path"
        )
    return True


def needed(recipe: Recipe) -> list[PrepareItem]:
    """Return the items of `[[prepare]]` that a run needs, there or not.

    Raises:
        ConfigError: a folder holds something else than the recipe asks for; nothing that exists is overwritten.
    """
    inputs, found, has_training = training_inputs(recipe), list[PrepareItem](), False
    # backwards: what serves to make a model is needed while that is not there
    for item in reversed(recipe.prepare):
        if item.path not in inputs or has_training:
            found.append(item)
            has_training |= item.trl_file is not None and not is_there(item)
    return found[::-1]


def missing(recipe: Recipe, *, at_start: bool) -> dict[str, str]:
    """Return what a run needs and is not there: folder -> its kind.

    Args:
        at_start: also what `tba run` fetches or makes itself.

    Raises:
        ConfigError: as `needed`.
    """
    wanted = [item for item in needed(recipe) if at_start or not item.at_start]
    return {item.path: item.kind for item in wanted if not is_there(item)}


def training_inputs(recipe: Recipe) -> set[str]:
    """Return the folders that only serve to make models: they stand before a model of TRL, and nothing else names them.

    TRL's own file names them.
    """
    last = max((index for index, item in enumerate(recipe.prepare) if item.trl_file is not None), default=0)
    named = set(_texts(recipe.model_dump(mode="json", exclude={"prepare"})))
    return {item.path for item in recipe.prepare[:last]} - named


def made_at_start(recipe: Recipe) -> set[str]:
    """Return the folders that `tba run` fetches or makes itself where they are missing."""
    return {item.path for item in recipe.prepare if item.at_start}


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a document."""
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)
    elif isinstance(value, str):
        yield value


def check_prepared(recipe: Recipe, *, at_start: bool = True) -> None:
    """Check before anything starts that every folder that a run needs is there.

    Args:
        at_start: also check what `tba run` fetches or makes itself.

    Raises:
        ConfigError: some are missing; names them, and the command that makes them.
    """
    absent = missing(recipe, at_start=at_start)
    if absent:
        names = ", ".join(f"{path} ({kind})" for path, kind in absent.items())
        raise ConfigError(f"the recipe needs {names}, not there yet; run `tba data prepare` with the same recipe")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return what was recorded when the folder was prepared, or None where it was not.

    Raises:
        ConfigError: the record is damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_bytes())
        return {"origin": dict(record["origin"]), "commit": record["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove the folder and prepare it again") from None


def begin_record(item: PrepareItem) -> None:
    """Record that the item's folder is being filled, and with what."""
    (Path(item.path) / HALF_DONE).write_text(json.dumps(item.origin) + "\n", encoding="utf-8")


def write_record(item: PrepareItem, *, commit: str | None, folder: Path | None = None) -> None:
    """Record where the content of the item's folder came from; from then on the folder is whole.

    Args:
        folder: that will be the item's, where it has not its name yet.
    """
    folder = folder or Path(item.path)
    (folder / RECORD).write_text(
        json.dumps({"origin": item.origin, "commit": commit}, indent=1) + "\n", encoding="utf-8"
    )
    (folder / HALF_DONE).unlink(missing_ok=True)


def _read_half(folder: Path) -> dict[str, Any] | None:
    """Return what the folder was being filled with, or None where that cannot be read."""
    try:
        origin = json.loads((folder / HALF_DONE).read_bytes())
    except (OSError, ValueError):
        return None
    return origin if isinstance(origin, dict) else None


def _describe(origin: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in origin.items() if value is not None)
