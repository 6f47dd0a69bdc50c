"""`python -m tba_cli.prompts.reasoning_gym LIST`: make the questions of some data sets with the library of that name.

LIST has the arguments of `entries` for each data set; it and the answer are JSON. A recipe always has the same prompts.
Some generators draw from Python's own random numbers, which are seeded here, or depend on the order of a set, which
`run_program` fixes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import random
import sys
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from tba.errors import ConfigError


def entries(name: str, options: dict[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Return the first `num_rows` entries, each question once; ConfigError for a wrong name or option."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1, 0)[0]
        raise ConfigError(f"reasoning_gym = {name!r}: there is no such data set; did you mean {near!r}?")
    takes = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size"}
    for option in options.keys() - takes:
        raise ConfigError(f"reasoning_gym = {name!r}: options has {option!r}; it takes {', '.join(sorted(takes))}")
    found: dict[str, dict[str, Any]] = {}
    try:
        dataset = create_dataset(name, **{"seed": 0} | options, size=num_rows)  # its default seed is a random one
        for index in range(num_rows):
            random.seed(index)
            entry = dataset[index]
            found.setdefault(entry["question"], entry)
    except Exception as error:  # each data set checks its own options, and raises anything
        raise ConfigError(f"reasoning_gym = {name!r}: {type(error).__name__}: {error}; correct its options") from None
    return list(found.values())


def plain(value: Any) -> Any:
    """Return a value of numpy as one of Python, and any other object as its text: no rule reads those."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a generator may print
            made = [entries(**settings) for settings in json.loads(sys.argv[1])]
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(made, default=plain))
