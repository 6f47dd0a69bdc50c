"""Kind `python`: a reward function with the signature of TRL, in worker processes.

    def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs) -> list[float | None]

A call gets up to BATCH_ITEMS items whose data have the same keys. Each key is a column, a list with one value per
item. If `prompt` of the data is a list of messages, prompts and completions are messages, as in TRL. `completion_ids`
are the token ids, if the client has sent them. `finish_reasons` are passed only to a function that names them. The
recipe's `kwargs` are passed unchanged. None in the result is an abstention: the item has no score. A call that raises
is repeated item by item, so that only the bad item fails; its detail names file and line. The pool splits a batch that
hangs or kills the process. A result of another shape fails all items of the call: item by item, such a function would
seem to work.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tba import plugins
from tba.config.reward import PythonSpec
from tba_reward.process_pool.job import WorkerRule
from tba_reward.process_pool.worker_main import find
from tba_reward.scorer import (
    BadDataError,
    Failure,
    Item,
    Outcome,
    Params,
    Scorer,
    checked,
    failure_of,
    params_of,
    version_of,
)
from tba_reward.scorers import Tools
from tba_reward.scorers.in_process_pool import ProcessPoolScorer

IMPLEMENTATION = 2
BATCH_ITEMS = 64
WHAT = "the function of reward kind 'python'"
"""Name of the recipe's key in error messages; the key has no fixed place in a recipe."""
_OWN = ("prompt", "prompts", "completion", "completions", "completion_ids", "finish_reasons")
"""Keys of the data that are not passed as columns, as in TRL."""
_ONLY_TRL = ("trainer_state", "environments")


def build(spec: PythonSpec, tools: Tools) -> Scorer:
    """Return the scorer; the function is imported in worker processes only."""
    name = plugins.check_name(spec.function, what=WHAT)
    origin = plugins.find_module(name, what=WHAT).origin
    digest = ""
    if origin is not None and Path(origin).is_file():
        digest = hashlib.sha256(Path(origin).read_bytes()).hexdigest()
    params = {**params_of(spec), "function": name}
    return ProcessPoolScorer(
        WorkerRule(
            function="tba_reward.scorers.python:score",
            params=params,
            prepare="tba_reward.scorers.python:load",
            batch_items=BATCH_ITEMS,
        ),
        pool=tools.pool,
        timeout_s=spec.timeout_s,
        version=version_of(spec, IMPLEMENTATION, name, digest),
    )


def load(params: Params) -> None:
    """Import the function, and check its parameters.

    Raises:
        ValueError: it needs an argument that only TRL's trainer has, or does not take one of the recipe's `kwargs`.
    """
    try:
        found = _load(params["function"])
    except (Exception, SystemExit) as error:
        _note_place(error, params["function"])
        raise
    for name in _ONLY_TRL:
        if found.parameters.get(name):
            raise ValueError(f"it needs {name!r}, which only TRL's trainer has: a score may depend only on its item")
    for name in params["kwargs"]:
        if not found.takes_all and name not in found.parameters:
            raise ValueError(f"it takes no argument {name!r}; remove it from `kwargs`")


def score(items: Sequence[Item], params: Params) -> list[Outcome]:
    """Return one outcome per item, in order; items whose data have the same keys share one call of the function."""
    alike: dict[tuple[str | bool, ...], list[int]] = {}
    for at, item in enumerate(items):
        key = (*sorted(item.data), item.response_tokens is not None, _is_conversational(item))
        alike.setdefault(key, []).append(at)
    outcomes = dict[int, Outcome]()
    for places in alike.values():
        outcomes |= zip(places, _score_alike([items[at] for at in places], params), strict=True)
    return [outcomes[at] for at in range(len(items))]


def _score_alike(items: Sequence[Item], params: Params) -> list[Outcome]:
    """Call the function once for all items; if it raises, once for each item alone. Return one outcome per item.

    Raises:
        MemoryError: memory ran out; the process must end to free it.
    """
    try:
        result = _call(items, params)
        values = result.tolist() if hasattr(result, "tolist") else result  # numpy, torch
        if not isinstance(values, list | tuple) or len(values) != len(items):
            got = type(result).__name__ + (f" of {len(values)}" if isinstance(values, list | tuple) else "")
            detail = f"{params['function']} got {len(items)} completions and returned a {got}: {result!r:.100}; "
            return [Failure("exception", detail + "return a list with one score for each completion")] * len(items)
        abstained = Failure("abstained", f"{params['function']} returned None")
        return [
            abstained if value is None else checked(value.item() if hasattr(value, "item") else value)
            for value in values
        ]
    except MemoryError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # foreign code may raise anything; it is reported
        if len(items) == 1:
            _note_place(error, params["function"])
            return [failure_of(error)]
    return [outcome for item in items for outcome in _score_alike([item], params)]


def _call(items: Sequence[Item], params: Params) -> Any:
    """Call the function for items whose data have the same keys, and return its result."""
    name = params["function"]
    found = _load(name)
    offered = {column: [item.data[column] for item in items] for column in items[0].data if column not in _OWN}
    prompts: list[Any] = [item.prompt for item in items]
    completions: list[Any] = [item.response for item in items]
    if _is_conversational(items[0]):
        prompts = [item.data["prompt"] for item in items]
        completions = [[{"role": "assistant", "content": item.response}] for item in items]
    offered |= {"prompts": prompts, "completions": completions}
    if tokens := [list(item.response_tokens) for item in items if item.response_tokens is not None]:
        offered["completion_ids"] = tokens
    # the recipe's arguments come before columns of the same name
    offered |= params["kwargs"]
    passed = offered if found.takes_all else {key: offered[key] for key in found.parameters if key in offered}
    # not for `**columns`: only a function that names them gets them
    only_named = {"finish_reasons": [item.finish_reason for item in items], "log_extra": _ignore, "log_metric": _ignore}
    passed |= {key: value for key, value in only_named.items() if key in found.parameters}
    missing = [key for key, is_required in found.parameters.items() if is_required and key not in passed]
    if "completion_ids" in missing:
        raise BadDataError(f"{name} needs `completion_ids`, but the item has no `response_tokens`")
    if missing:
        raise BadDataError(f"{name} needs the column {missing[0]!r}, which the prompt's data lacks")
    result = found.function(**passed)

    async def awaited() -> Any:
        return await result

    # no event loop runs around it, so that a function that is not async can run one of its own
    return asyncio.run(awaited()) if inspect.isawaitable(result) else result


def _note_place(error: BaseException, name: str) -> None:
    """Note FILE:LINE of the deepest call in the folder of the function's module: what a person can correct."""
    place = plugins.place_of(error, name, what=WHAT)
    # in place of older notes: a function may raise the same object again and again; a frozen dataclass takes none
    with suppress(AttributeError):
        error.__notes__ = [] if place is None else [place]


def _is_conversational(item: Item) -> bool:
    return isinstance(item.data.get("prompt"), list)


def _ignore(name: str, value: Any) -> None:
    """Do nothing, in place of TRL's `log_extra` and `log_metric`: there is no table of completions here."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A reward function, whether each of its parameters is required, and whether it takes `**kwargs`."""

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
