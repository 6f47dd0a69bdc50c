"""Names of older releases: refused with the new name where people write them, read where runs have stored them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RENAMED_KEYS = {
    "buffer.max_tail_events": "buffer.max_log_events_since_checkpoint",
    "model.warm_start.careless_steps": "model.warm_start.noise_steps",
    "model.warm_start.school_accuracy": "model.warm_start.target_accuracy",
    "model.warm_start.school_max_steps": "model.warm_start.max_steps",
    "prepare.by_hand": "prepare.manual",
    "scaling.release_when_over": "scaling.scale_down_on_run_end",
    "searcher.when_over": "searcher.on_run_end",
    "trainer.guards.lower_rate_factor": "trainer.guards.lower_learning_rate_factor",
    "trainer.guards.raise_m_by": "trainer.guards.raise_most_on_policy_prob_by",
}
"""Dotted key of an older release -> its name now, in the same section."""
RENAMED_VALUES = {
    "trainer.guards.*.action": {"lower_rate": "lower_learning_rate", "raise_m": "raise_most_on_policy_prob"},
}
"""Dotted key, `*` for any section -> text of an older release -> its name now."""


def new_name(keys: Sequence[str]) -> str | None:
    """Return the dotted name that a key of an older release has now; None for every other key.

    Args:
        keys: the parts of the dotted key; positions in lists may be among them.
    """
    return RENAMED_KEYS.get(".".join(key for key in keys if not key.isdigit()))


def new_value(keys: Sequence[str], text: str) -> str:
    """Return the name that a value of an older release has now; every other value as it is.

    Args:
        keys: the parts of the dotted key.
        text: the value as it was written: bare, in quotes or as JSON.
    """
    for key, names in RENAMED_VALUES.items():
        parts = key.split(".")
        if len(parts) == len(keys) and all(part in ("*", own) for part, own in zip(parts, keys, strict=True)):
            bare = text.strip().strip("\"'")
            return text.replace(bare, names[bare]) if bare in names else text
    return text


def with_new_names(document: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return a stored document with today's names.

    Args:
        document: a recipe, or one section of it.
        section: the dotted name of that section; empty for a whole recipe.
    """
    renamed = copy.deepcopy(dict(document))
    for old, new in RENAMED_KEYS.items():
        *path, last = old.split(".")
        for table in _tables(renamed, path, section):
            if last in table:
                # a document that has both names was written by this release: its own name wins
                table.setdefault(new.rpartition(".")[2], table.pop(last))
    for key, names in RENAMED_VALUES.items():
        *path, last = key.split(".")
        for table in _tables(renamed, path, section):
            if isinstance(table.get(last), str):
                table[last] = names.get(table[last], table[last])
    return renamed


def _tables(document: dict[str, Any], path: Sequence[str], section: str) -> Iterator[dict[str, Any]]:
    """Yield the tables at a path of the recipe that lie in a section of it; those of a list one by one."""
    inside = section.split(".") if section else []
    # the section that is given alone has no such key
    if path[: len(inside)] != inside:
        return
    found: list[Any] = [document]
    for part in path[len(inside) :]:
        children = [child for table in found for child in (table.values() if part == "*" else [table.get(part)])]
        flat = [item for child in children for item in (child if isinstance(child, list) else [child])]
        found = [item for item in flat if isinstance(item, dict)]
    yield from found
