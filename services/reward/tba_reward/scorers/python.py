"""Kind `python`: a function with the signature that people know from TRL, in worker processes.

    def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs) -> list[float | None]

A call gets up to `batch_items` items whose data have the same keys. Each key is a column, a list with one value per
item; `completion_ids` are the token ids where the client has sent them, `finish_reasons` come along when the function
names them, and the recipe's `kwargs` as they are. None is an abstention: there is no score. Calls of an `async`
function for one batch are under way at once. A call that raises is repeated item by item, so that an item which the
function cannot take costs only itself; a batch that hangs or kills the process is taken apart by the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from tba.config.reward import PythonSpec
from tba.errors import ConfigError
from tba_reward.scorers.base import (
    BadDataError,
    Failure,
    Item,
    Outcome,
    Params,
    Scorer,
    Tools,
    checked,
    failure_of,
    params_of,
    version_of,
)
from tba_reward.workers.rule import WorkerRule
from tba_reward.workers.scorer import WorkerScorer
from tba_reward.workers.table import find

IMPLEMENTATION = 2
ENTRY_POINT_GROUP = "tba.rewards"
_OWN = ("prompt", "prompts", "completion", "completions", "completion_ids", "finish_reasons")
"""Keys of the data that are no columns, as in TRL."""
_ONLY_TRL = ("trainer_state", "environments")
T = TypeVar("T")


def build(spec: PythonSpec, tools: Tools) -> Scorer:
    """The scorer; the function is imported in worker processes only.

    Raises:
        ConfigError: no such entry point, or no such module.
    """
    name = resolve(spec.function)
    params = {**params_of(spec), "function": name}
    return WorkerScorer(
        WorkerRule(
            function="tba_reward.scorers.python:score",
            params=params,
            prepare="tba_reward.scorers.python:load",
            batch_items=spec.batch_items,
        ),
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
    """Import the function.

    Raises:
        ValueError: it needs what only TRL's trainer has, or cannot take what the recipe passes it.
    """
    found = _load(params["function"])
    for name in _ONLY_TRL:
        if found.parameters.get(name):
            raise ValueError(
                f"it needs {name!r}, which only TRL's trainer has: a score depends on nothing but its item"
            )
    for name in params["kwargs"]:
        if not found.takes_all and name not in found.parameters:
            raise ValueError(f"it takes no argument {name!r}; remove it from `kwargs`")


def score(items: Sequence[Item], params: Params) -> list[Outcome]:
    """An outcome each: what the function gives, in one call for all items whose data have the same keys."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for at, item in enumerate(items):
        has_tokens = ("completion_ids",) if item.response_tokens is not None else ()
        alike.setdefault((*sorted(item.data), *has_tokens), []).append(at)
    calls, outcomes = list(alike.values()), dict[int, Outcome]()
    while calls:
        again = []
        for places, found in zip(calls, _made([[items[at] for at in call] for call in calls], params), strict=True):
            if not isinstance(found, BaseException):
                outcomes |= zip(places, found, strict=True)
            elif len(places) == 1:
                outcomes[places[0]] = failure_of(found)
            else:
                again += [[at] for at in places]
        calls = again
    return [outcomes[at] for at in range(len(items))]


def _made(calls: Sequence[Sequence[Item]], params: Params) -> list[list[Outcome] | BaseException]:
    """What became of calls: outcomes, or what was raised. A function that is not async runs outside of an event loop,
    so that it can have one of its own."""
    found: list[Any] = [_caught(lambda items=items: _call(items, params)) for items in calls]
    waiting = [at for at, each in enumerate(found) if inspect.isawaitable(each)]
    if waiting:
        done = asyncio.run(_gathered([found[at] for at in waiting]))
        for at, each in zip(waiting, done, strict=True):
            found[at] = each
    return [
        each if isinstance(each, BaseException) else _caught(lambda each=each, items=items: _read(each, items, params))
        for each, items in zip(found, calls, strict=True)
    ]


def _caught(call: Callable[[], T]) -> T | BaseException:
    """What a call returns or raises; foreign code may raise anything. Out of memory, the process has to end."""
    try:
        return call()
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        return error


async def _gathered(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*map(_awaited, awaitables))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    """What it returns or raises, as in `_caught`; `gather` alone lets SystemExit end the worker."""
    try:
        return await awaitable
    except MemoryError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return error


def _call(items: Sequence[Item], params: Params) -> Any:
    """What the function returns for items whose data have the same keys.

    Raises:
        BadDataError: it needs a column that the prompts' data do not have.
    """
    name = params["function"]
    found = _load(name)
    offered = {column: [item.data[column] for item in items] for column in items[0].data if column not in _OWN}
    offered |= _completions(items, conversational=params["conversational"])
    offered |= params["kwargs"]
    passed = offered if found.takes_all else {key: offered[key] for key in found.parameters if key in offered}
    only_named = {"finish_reasons": [item.finish_reason for item in items], "log_extra": _ignore, "log_metric": _ignore}
    passed |= {key: value for key, value in only_named.items() if key in found.parameters}
    missing = [key for key, is_required in found.parameters.items() if is_required and key not in passed]
    if "completion_ids" in missing:
        raise BadDataError(f"{name} needs `completion_ids`, and the item came without `response_tokens`")
    if missing:
        raise BadDataError(f"{name} needs the column {missing[0]!r}, which the prompt's data lacks")
    return found.function(**passed)


def _read(scores: Any, items: Sequence[Item], params: Params) -> list[Outcome]:
    """The outcomes in what the function returned.

    Raises:
        TypeError: it is not a list with one score per item.
    """
    values = scores.tolist() if hasattr(scores, "tolist") else scores  # numpy, torch
    if not isinstance(values, list | tuple) or len(values) != len(items):
        completions = "one completion" if len(items) == 1 else f"each of {len(items)} completions"
        raise TypeError(f"{params['function']} returned {scores!r:.100}, not a list with one score for {completions}")
    return [_checked(value, params["function"]) for value in values]


def _completions(items: Sequence[Item], *, conversational: bool) -> dict[str, list[Any]]:
    """Prompts and completions as TRL passes them."""
    prompts: list[Any] = [item.prompt for item in items]
    completions: list[Any] = [item.response for item in items]
    if conversational:
        prompts = [_messages(item) for item in items]
        completions = [[{"role": "assistant", "content": item.response}] for item in items]
    offered = {"prompts": prompts, "completions": completions}
    tokens = [list(item.response_tokens) for item in items if item.response_tokens is not None]
    return {**offered, "completion_ids": tokens} if tokens else offered


def _messages(item: Item) -> list[Any]:
    """The messages of a prompt that its data has (TRL's column `prompt`); else its text is what the user says."""
    messages = item.data.get("prompt")
    return messages if isinstance(messages, list) else [{"role": "user", "content": item.prompt}]


def _ignore(name: str, value: Any) -> None:
    """TRL's `log_extra` and `log_metric`: there is no table of completions here; metrics of scorers are `parts`."""


def _checked(value: Any, function: str) -> Outcome:
    if value is None:
        return Failure("abstained", f"{function} returned None")
    return checked(value.item() if hasattr(value, "item") else value)  # numpy, torch


@dataclass(frozen=True, slots=True)
class _Function:
    """A function, its parameters with whether each must be given, and whether it takes any others."""

    function: Callable[..., Any]
    parameters: Mapping[str, bool]
    takes_all: bool


@lru_cache(maxsize=16)
def _load(name: str) -> _Function:
    function = find(name)
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return _Function(function, {each.name: each.default is each.empty for each in named}, takes_all)


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
