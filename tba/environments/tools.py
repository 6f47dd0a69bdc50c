"""Tools: typed Python functions with a docstring, whose JSON schemas the policy sees.

The schema comes from the signature by pydantic, as arguments are checked by it too. A parameter is described by
`Annotated[int, Field(description=...)]`, or in an `Args:` section of the docstring.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call

from tba.environments.protocol import EpisodeError
from tba.errors import ConfigError

OURS = (OSError, MemoryError, TimeoutError)
"""Exceptions of a tool that say nothing about the call: a file, a network, memory."""
_ARG = re.compile(r"(\w+)(?: \([^)]*\))?:\s*(.*)")


class ToolError(Exception):
    """A call cannot be answered, and the policy is told why."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]

    def bound(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Return the call with these arguments, to be made; raise ToolError if they do not fit."""
        try:
            checked = validate_call(_recorder(self.function))(**arguments)
        except ValidationError as error:
            said = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()
            )
            raise ToolError(f"{self.name}: {said}") from None
        return lambda: self.function(*checked[0], **checked[1])


def _recorder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same signature that returns its arguments."""

    def record(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    hints = inspect.get_annotations(inspect.unwrap(getattr(function, "__func__", function)), eval_str=True)
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=hints.get(name, each.annotation)) for name, each in signature.parameters.items()
    ]
    record.__signature__ = signature.replace(parameters=parameters, return_annotation=Any)  # type: ignore[attr-defined]
    record.__annotations__ = {each.name: each.annotation for each in parameters}
    record.__name__ = getattr(function, "__name__", "tool")
    return record


def tool_of(function: Any) -> Tool:
    """Return the tool of a function; raise ConfigError without a docstring or without types that a schema describes."""
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise ConfigError(f"tool {function!r:.80} is no function; give a typed function with a docstring")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"tool {name} is a generator; return a value")
    text = inspect.getdoc(function) or ""
    if not text:
        raise ConfigError(f"tool {name} has no docstring, which tells the policy what it does; write one")
    try:
        untyped = [key for key, each in inspect.signature(function).parameters.items() if each.annotation is each.empty]
        if untyped:
            raise ConfigError(f"tool {name}: parameter {untyped[0]!r} has no type; give each one a type")
        parameters = TypeAdapter[Any](cast("Any", _recorder(function))).json_schema()
    except ConfigError:
        raise
    except Exception as error:  # types that no schema describes raise errors of many kinds
        raise ConfigError(f"tool {name}: its signature has no JSON schema ({error})") from None
    if parameters.get("type") != "object":
        raise ConfigError(f"tool {name}: all of its parameters must be callable by name")
    described = _described(text)
    for key, schema in parameters.get("properties", {}).items():
        schema.pop("title", None)
        if key in described and "description" not in schema:
            schema["description"] = described[key]
    parameters.pop("additionalProperties", None)
    summary = re.split(r"\n\s*\n|\n\s*(?:Args|Returns|Raises):", text)[0]
    function_schema = {"name": name, "description": " ".join(summary.split()), "parameters": parameters}
    return Tool(name, {"type": "function", "function": function_schema}, function)


def _described(text: str) -> dict[str, str]:
    """Return what the `Args:` section of a docstring says about each parameter."""
    found, name = dict[str, str](), None
    for line in text.partition("Args:\n")[2].splitlines():
        if line.strip() and not line.startswith((" ", "\t")):
            break  # the next section
        if (start := _ARG.fullmatch(line.strip())) is not None:
            name, found[start[1]] = start[1], start[2]
        elif name is not None and line.strip():
            found[name] += " " + line.strip()
    return found


def text_of(result: Any) -> str:
    """Return what a tool answered as the text that the policy reads."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def failure_of(name: str, error: Exception) -> EpisodeError | str:
    """Return the failure that ends the episode, or the text that tells the policy what its call did wrong."""
    if isinstance(error, EpisodeError):
        return error
    if isinstance(error, ToolError):
        return str(error)
    if isinstance(error, OURS):
        return EpisodeError(f"tool {name}: {type(error).__name__}: {error}", boundary="tool")
    return f"{type(error).__name__}: {error}"
