"""Load objects of your own that a recipe names: a scorer, an objective, an engine, a tracker, a prompt source.

    MODULE:NAME    an attribute of a module that the process can import; dots in NAME go into a class

docs/extending.md has the protocol of each kind and an example. Any error of foreign code while it is loaded becomes a
ConfigError that names the key, its value and the remedy. `what` names the key in messages.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from tba.errors import ConfigError, TbaError, did_you_mean

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_name(value: str, *, what: str, builtin: Sequence[str] = ()) -> str:
    """Return `value` if it is a built-in name or of the form MODULE:NAME, else raise ConfigError. Import nothing."""
    if value not in builtin and not _PATH.fullmatch(value):
        known = f" (known are {', '.join(builtin)})" if builtin else ""
        fix = did_you_mean(value, builtin) or "; write MODULE:NAME, such as my_module:my_name"
        raise ConfigError(f"{what} {value!r} is not known{known}, and no import path{fix}")
    return value


def load(value: str, *, what: str) -> Any:
    """Import the function or class MODULE:NAME, also from the current folder; raise ConfigError if that fails."""
    check_name(value, what=what)
    _add_current_folder()
    with explain_errors(value, what=what, verb="cannot be imported"):
        found = import_object(value)
    if not callable(found):
        raise ConfigError(f"{what} {value!r} is a {type(found).__name__} and not a function or class; {remedy(what)}")
    return found


def build(value: str, *arguments: Any, what: str, kind: Any) -> Any:
    """Call the class or function that `value` names with `arguments`, and return the result.

    Args:
        kind: the `runtime_checkable` protocol that the result must have; else ConfigError is raised.
    """
    factory = load(value, what=what)
    with explain_errors(value, what=what, verb="failed"):
        made = factory(*arguments)
    if not isinstance(made, kind):
        raise ConfigError(
            f"{what} {value!r} made {made!r:.80}, which lacks members of {kind.__module__}.{kind.__name__}; add them "
            "(docs/extending.md)"
        )
    return made


def import_object(path: str) -> Any:
    """Import and return the object at MODULE:NAME; errors of its code are raised unchanged."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def find_module(path: str, *, what: str) -> ModuleSpec:
    """Return the spec of the module in MODULE:NAME, without importing it or the packages above it."""
    _add_current_folder()
    module = path.partition(":")[0]
    top, *parts = module.split(".")
    spec = next((spec for finder in sys.meta_path if (spec := finder.find_spec(top, None)) is not None), None)
    # part by part: for a dotted name importlib would import the packages above it
    for part in parts:
        folders = None if spec is None else spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(part, list(folders))
    if spec is None:
        raise ConfigError(f"{what} {path!r}: there is no module {module!r}; {remedy(what)}")
    return spec


def place_of(error: BaseException, path: str, *, what: str) -> str | None:
    """Return FILE:LINE of the deepest call in the folder of the module in MODULE:NAME: what a person can correct."""
    folder = Path(find_module(path, what=what).origin or "").parent
    calls = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{file.name}:{line}" for file, line in reversed(calls) if file.parent == folder), None)


@contextmanager
def explain_errors(value: str, *, what: str, verb: str) -> Iterator[None]:
    """Turn errors of the `with` block into ConfigErrors with the message WHAT VALUE VERB (ERROR); a TbaError stays."""
    try:
        yield
    except TbaError:
        raise
    except (Exception, SystemExit) as error:  # foreign code raises anything, and may call sys.exit
        fix = remedy(what)
        if isinstance(error, AttributeError) and error.name is not None:
            fix += did_you_mean(error.name, dir(error.obj))
        raise ConfigError(f"{what} {value!r} {verb} ({type(error).__name__}: {error}); {fix}") from error


def _add_current_folder() -> None:
    """Add the current folder to sys.path, which the script `tba` lacks and `python -m` has."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def remedy(what: str) -> str:
    """Return the part of an error message that says what to do when a plugin cannot be used."""
    return f"correct {what}, install its package, or put the folder of its module on PYTHONPATH"
