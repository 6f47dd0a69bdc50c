"""Kind `python`: a function with the signature that people know from TRL, in worker processes.

    def reward(prompts: list[str], completions: list[str], answer: list[str], **columns) -> list[float | None]

Every call holds one item: a score depends on nothing else, so that it can be kept, and an item that hangs or crashes
costs only itself. Each key of the prompt's data is a column, a list of one value; `finish_reasons` comes along when
the function names it. None is an abstention: there is no score. The function may be `async`.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tba.config.reward import PythonSpec
from tba.errors import ConfigError
from tba_reward.scorers.base import (
    AbstainedError,
    BadDataError,
    Item,
    Params,
    Scorer,
    Tools,
    params_of,
    version_of,
)
from tba_reward.workers.rule import WorkerRule
from tba_reward.workers.scorer import WorkerScorer
from tba_reward.workers.table import find

IMPLEMENTATION = 1
ENTRY_POINT_GROUP = "tba.rewards"
_OWN = ("prompts", "completions", "finish_reasons")


def build(spec: PythonSpec, tools: Tools) -> Scorer:
    """The scorer; the function is imported in worker processes only.

    Raises:
        ConfigError: no such entry point, or no such module.
    """
    name = resolve(spec.function)
    params = {**params_of(spec), "function": name}
    return WorkerScorer(
        WorkerRule(function="tba_reward.scorers.python:score", params=params, prepare="tba_reward.scorers.python:load"),
        pool=tools.pool,
        timeout_s=tools.timeout_s(spec),
        version=version_of(spec, IMPLEMENTATION, name, _digest(name)),
        example=None,  # what a foreign function gives for which item is not known
    )


def resolve(function: str) -> str:
    """`module:name` of a function that is named so, or by an entry point.

    Raises:
        ConfigError: no entry point has this name.
    """
    if ":" in function:
        return function
    found = entry_points(group=ENTRY_POINT_GROUP)
    if function not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigError(
            f"reward kind 'python': {function!r} is neither `module:name` nor an entry point in the group "
            f"{ENTRY_POINT_GROUP!r} (known: {known}); install the package that has it, or write `module:name`"
        )
    return found[function].value.replace(" ", "")


def load(params: Params) -> None:
    """Import the function."""
    _load(params["function"])


def score(item: Item, params: Params) -> float:
    """What the function gives for one item.

    Raises:
        AbstainedError: the function gave None.
        BadDataError: the function needs a column that the prompt's data does not have.
    """
    function, names, takes_all = _load(params["function"])
    offered = {name: [value] for name, value in item.data.items() if name not in _OWN}
    columns = offered if takes_all else {name: offered[name] for name in names if name in offered}
    if "finish_reasons" in names:
        columns["finish_reasons"] = [item.finish_reason]
    missing = [name for name, required in names.items() if required and name not in columns and name not in _OWN]
    if missing:
        raise BadDataError(f"{params['function']} needs the column {missing[0]!r}, which the prompt's data lacks")
    scores = function(prompts=[item.prompt], completions=[item.response], **columns)
    if inspect.iscoroutine(scores):
        scores = asyncio.run(scores)
    return _only(scores, params["function"])


def _only(scores: Any, function: str) -> float:
    try:
        (value,) = scores
    except (TypeError, ValueError):
        raise TypeError(f"{function} returned {scores!r:.100}, not a list with one score for one completion") from None
    if value is None:
        raise AbstainedError(f"{function} returned None")
    return value.item() if hasattr(value, "item") else value  # numpy, torch


@lru_cache(maxsize=16)
def _load(name: str) -> tuple[Callable[..., Any], dict[str, bool], bool]:
    """The function, its parameters with whether each must be given, and whether it takes any others."""
    function = find(name)
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return function, {each.name: each.default is each.empty for each in named}, takes_all


def _digest(name: str) -> str:
    """Digest of the file that has the function; the packages above it are not run.

    Raises:
        ConfigError: there is no such module.
    """
    module = name.partition(":")[0]
    top, *parts = module.split(".")
    spec = next((spec for finder in sys.meta_path if (spec := finder.find_spec(top, None)) is not None), None)
    for part in parts:  # by its own name: importlib wants the packages above in sys.modules for a whole one
        folders = None if spec is None else spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(part, list(folders))
    if spec is None:
        raise ConfigError(
            f"reward kind 'python': there is no module {module!r}; install it, or put its folder on PYTHONPATH"
        )
    if spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
