"""The folders that must be there before a run: whether each is there and holds what the recipe asks for.

[[prepare]]                  PATH/.tba-prepare     JSON, written last: where the content came from
[[sft]], [[reward_training]] PATH/supervised.json  JSON: the settings of the training, and the digest of its examples

A folder without such a file belongs to a person, and is taken as it is. What only serves to make a model is not needed
where that model is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tba.config import Recipe
from tba.config.data import PrepareItem
from tba.config.supervised import REPORT_FILE, SupervisedItem
from tba.errors import ConfigError

RECORD = ".tba-prepare"
HALF_DONE = ".tba-prepare.partial"
"""File in a folder that is being fetched, JSON: what is fetched."""

ANEW = (
    "remove that folder or train it anew (--again of `tba sft` and `tba train-reward`), or give the item another path"
)
"""What to do about a model that was trained with something else."""


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


class Needed(NamedTuple):
    """What a run needs."""

    prepare: list[PrepareItem]
    """Items of `[[prepare]]`, there or not."""
    to_train: dict[str, SupervisedItem]
    """Models of `[[sft]]` and `[[reward_training]]` that are not there, in their order: folder -> how."""

    def missing(self, *, at_start: bool) -> dict[str, str]:
        """Return what is not there: folder -> its kind.

        Args:
            at_start: also what `tba run` fetches or makes itself.
        """
        items = {item.path: item.kind for item in self.prepare if (at_start or not item.at_start)}
        fetched = {item.path: item.kind for item in self.prepare if item.path in items and not is_there(item)}
        return fetched | {path: "model" for path, item in self.to_train.items() if at_start or not item.at_start}


def needed(recipe: Recipe) -> Needed:
    """Return what a run needs. A base or a data set is needed only where something has to be made of it.

    Raises:
        ConfigError: a folder holds something else than the recipe asks for; nothing that exists is overwritten.
    """
    inputs, used = training_inputs(recipe), set[str]()
    prepare: list[PrepareItem] = []
    to_train: dict[str, SupervisedItem] = {}
    # backwards: an item is needed for those behind it
    for path, item in reversed(recipe.supervised.items()):
        if (path not in inputs or path in used) and not is_trained(path, item):
            to_train[path] = item
            used |= {item.base or "", item.dataset}
    has_training = False
    for item in reversed(recipe.prepare):
        if item.path not in inputs or item.path in used or has_training:
            prepare.append(item)
            has_training |= item.trl_file is not None and not is_there(item)
    return Needed(prepare[::-1], dict(reversed(to_train.items())))


def training_inputs(recipe: Recipe) -> set[str]:
    """Return the folders that only serve to make models: no other part of the recipe names them."""
    inputs = {path for item in recipe.supervised.values() for path in (item.base, item.dataset) if path is not None}
    # what TRL trains with stands in its own file: an item before it that nothing else names is for it
    last = max((index for index, item in enumerate(recipe.prepare) if item.trl_file is not None), default=0)
    inputs |= {item.path for item in recipe.prepare[:last]}
    return inputs - set(_texts(recipe.model_dump(mode="json", exclude={"prepare", "sft", "reward_training"})))


def made_at_start(recipe: Recipe) -> set[str]:
    """Return the folders that `tba run` fetches or makes itself where they are missing."""
    fetched = {item.path for item in recipe.prepare if item.at_start}
    return fetched | {path for path, item in recipe.supervised.items() if item.at_start}


def is_trained(path: str, item: SupervisedItem) -> bool:
    """Return whether the folder that an item of `[[sft]]` or `[[reward_training]]` makes is there.

    Raises:
        ConfigError: it was made with other settings.
    """
    folder = Path(path).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{path} is a file, and must be a folder; remove it")
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    report = folder / REPORT_FILE
    if report.is_file():
        check_trained(report.read_bytes(), item, where=path)
    return True


def check_trained(data: bytes, item: SupervisedItem, *, where: str) -> str:
    """Check that a model was trained with the settings of the recipe.

    Args:
        data: its report, supervised.json.
        where: its place, for errors.

    Returns:
        The digest of the examples that it learned from.

    Raises:
        ConfigError: it was trained with others, or the report is damaged.
    """
    try:
        report = json.loads(data)
        # validated, so that a key which this release has added has its default
        made = type(item).model_validate({**report["settings"], "path": "any"})
        digest = str(report["examples_sha256"])
    except (ValueError, KeyError, TypeError, ValidationError):
        raise ConfigError(f"{REPORT_FILE} of {where} is damaged; remove the folder, and it is made again") from None
    found, wanted = (dict(_leaves(section.deciding())) for section in (made, item))
    # in the order of the recipe's keys
    for key in (*wanted, *found):
        if found.get(key) != wanted.get(key):
            raise ConfigError(
                f"{where} was trained with {key} = {found.get(key)!r}, and the recipe asks for {wanted.get(key)!r}; "
                f"{ANEW}"
            )
    return digest


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _leaves(child, f"{key}.{name}" if key else name)
    else:
        yield key, value


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
    missing = needed(recipe).missing(at_start=at_start)
    if missing:
        names = ", ".join(f"{path} ({kind})" for path, kind in missing.items())
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


def write_record(item: PrepareItem, *, commit: str | None) -> None:
    """Record where the content of the item's folder came from; from then on the folder is whole."""
    folder = Path(item.path)
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
