"""The folders that `[[prepare]]` of a recipe names: whether each is there and holds what the recipe asks for.

PATH/.tba-prepare    JSON, written last: where the content came from; a folder without it belongs to a person
"""

from __future__ import annotations

import json
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
    if item.manual is None and record is not None and record["origin"] != item.origin:
        raise ConfigError(
            f"{item.path} holds {_describe(record['origin'])}, and the recipe asks for {_describe(item.origin)}; "
            "remove that folder, or give the item of [[prepare]] another path"
        )
    return True


def check_prepared(recipe: Recipe, *, at_start: bool = True) -> None:
    """Check before anything starts that every folder of `[[prepare]]` is there.

    Args:
        at_start: also check what `tba run` fetches or makes itself.

    Raises:
        ConfigError: some are missing; names them, and the command that makes them.
    """
    missing = [item for item in recipe.prepare if (at_start or not item.at_start) and not is_there(item)]
    if missing:
        names = ", ".join(f"{item.path} ({item.kind})" for item in missing)
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
        record = json.loads(path.read_text())
        return {"origin": dict(record["origin"]), "commit": record["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove the folder and prepare it again") from None


def begin_record(item: PrepareItem) -> None:
    """Record that the item's folder is being filled, and with what."""
    (Path(item.path) / HALF_DONE).write_text(json.dumps(item.origin) + "\n")


def write_record(item: PrepareItem, *, commit: str | None) -> None:
    """Record where the content of the item's folder came from; from then on the folder is whole."""
    folder = Path(item.path)
    (folder / RECORD).write_text(json.dumps({"origin": item.origin, "commit": commit}, indent=1) + "\n")
    (folder / HALF_DONE).unlink(missing_ok=True)


def _read_half(folder: Path) -> dict[str, Any] | None:
    """Return what the folder was being filled with, or None where that cannot be read."""
    try:
        origin = json.loads((folder / HALF_DONE).read_text())
    except (OSError, ValueError):
        return None
    return origin if isinstance(origin, dict) else None


def _describe(origin: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in origin.items() if value is not None)
