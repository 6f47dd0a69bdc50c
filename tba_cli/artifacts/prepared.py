"""Find the folders that must exist before a run, and check that each holds what the recipe asks for.

PATH/.tba-prepare           JSON: where the content came from
.NAME.DIGEST.partial        beside PATH: an unfinished download or training; renamed to PATH when it is complete

A folder without `.tba-prepare` was made by the user, and is accepted as it is. A folder that only serves to make a
model is not needed if that model exists.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.config.data import PrepareItem
from tba.errors import ConfigError

RECORD = ".tba-prepare"
DIGEST_DIGITS = 8


def is_there(item: PrepareItem) -> bool:
    """Return whether the item's folder exists and is not empty; ConfigError if it was made for another item."""
    folder = Path(item.path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{item.path} is a file, and must be a folder; remove it")
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    record = read_record(folder)
    is_comparable = all(value for name, value in item.origin.items() if name.endswith("_sha256"))
    if item.manual is None and record is not None and is_comparable and record["origin"] != item.origin:
        raise ConfigError(
            f"{item.path} holds {_describe(record['origin'])}, and the recipe asks for {_describe(item.origin)}; "
            "remove that folder, or give the item of [[prepare]] another path"
        )
    return True


def needed(recipe: Recipe) -> list[PrepareItem]:
    """Return the items of `[[prepare]]` that a run needs, whether their folders exist or not."""
    inputs, found, has_training = training_inputs(recipe), list[PrepareItem](), False
    # backwards: what serves to make a model is needed while that is not there
    for item in reversed(recipe.prepare):
        if item.path not in inputs or has_training:
            found.append(item)
            has_training |= item.trl_file is not None and not is_there(item)
    return found[::-1]


def missing(recipe: Recipe, *, at_start: bool) -> dict[str, str]:
    """Return the folders that a run needs and that do not exist, as {path: kind}.

    Args:
        at_start: whether to include folders that `tba run` fetches or makes itself.
    """
    wanted = [item for item in needed(recipe) if at_start or not item.at_start]
    return {item.path: item.kind for item in wanted if not is_there(item)}


def training_inputs(recipe: Recipe) -> set[str]:
    """Return the paths of folders that only serve to train models with TRL.

    Such a folder comes before a model of TRL in `[[prepare]]`, and no other section of the recipe names it.
    """
    last = max((index for index, item in enumerate(recipe.prepare) if item.trl_file is not None), default=0)
    named = set(_texts(recipe.model_dump(mode="json", exclude={"prepare"})))
    return {item.path for item in recipe.prepare[:last]} - named


def made_at_start(recipe: Recipe) -> set[str]:
    """Return the paths of folders that `tba run` fetches or makes itself if they are missing."""
    return {item.path for item in recipe.prepare if item.at_start}


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a document."""
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)
    elif isinstance(value, str):
        yield value


def check_prepared(recipe: Recipe, *, at_start: bool = True) -> None:
    """Raise ConfigError if a folder that a run needs does not exist.

    Args:
        at_start: whether to include folders that `tba run` fetches or makes itself.
    """
    absent = missing(recipe, at_start=at_start)
    if absent:
        names = ", ".join(f"{path} ({kind})" for path, kind in absent.items())
        raise ConfigError(f"the recipe needs {names}, not there yet; run `tba data prepare` with the same recipe")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the origin and commit that were recorded when the folder was prepared; None if there is no record."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_bytes())
        return {"origin": dict(record["origin"]), "commit": record["commit"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove the folder and prepare it again") from None


def begin(item: PrepareItem) -> Path:
    """Create and return the partial folder in which the item is made; `publish` renames it to the item's path.

    Each origin has its own partial folder, because a download or training continues with the files in it. Partial
    folders of other origins are deleted.
    """
    made = _partial_folder(item)
    for other in made.parent.glob(f".{glob.escape(Path(item.path).name)}.{'?' * DIGEST_DIGITS}.partial"):
        if other != made:
            shutil.rmtree(other)
    made.mkdir(parents=True, exist_ok=True)
    return made


def _partial_folder(item: PrepareItem) -> Path:
    digest = hashlib.sha256(json.dumps(item.origin).encode()).hexdigest()[:DIGEST_DIGITS]
    folder = Path(item.path)
    return folder.with_name(f".{folder.name}.{digest}.partial")


def publish(item: PrepareItem, made: Path, *, commit: str | None) -> None:
    """Record origin and commit in the finished folder `made`, and rename it to the path of the item."""
    if made != _partial_folder(item):
        raise ConfigError(f"{item.path}: the file that it is made from changed meanwhile; run this command again")
    record = {"origin": item.origin, "commit": commit}
    (made / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    try:
        # in place of an empty folder, too
        made.rename(item.path)
    except OSError as error:
        raise ConfigError(f"{made} cannot become {item.path} ({error.strerror}); run this command again") from None


def _describe(origin: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in origin.items() if value is not None)
