"""Objects that a recipe names: a scorer, an objective, an engine, a tracker, a prompt source.

    MODULE:NAME    an attribute of a module that the process can import; dots in NAME go into a class
    NAME           an entry point of an installed package; the group says which kind of object it is

docs/extending.md has the protocol of each kind and an example. Whatever foreign code raises while it is loaded becomes
a ConfigError that names the key, its value and the remedy.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Literal

from tba.errors import ConfigError, TbaError

Group = Literal["tba.engines", "tba.objectives", "tba.prompt_sources", "tba.scorers", "tba.trackers"]
"""Groups of entry points, one for each kind of object."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def resolve(value: str, *, group: Group, what: str, builtin: Sequence[str] = ()) -> str:
    """Return MODULE:NAME of the object that `value` names, or a built-in name as it is. Nothing is imported.

    Args:
        what: the recipe's key, for errors.
        builtin: names that need no plugin; they come before entry points.

    Raises:
        ConfigError: it is neither a built-in name, nor an import path, nor an entry point that is installed here.
    """
    if value in builtin:
        return value
    if ":" in value:
        if not _PATH.fullmatch(value):
            raise ConfigError(
                f"{what} {value!r} is not an import path; write MODULE:NAME, for example my_module:my_name"
            )
        return value
    points = {point.name: point for point in importlib.metadata.entry_points(group=group)}
    if value not in points:
        known = ", ".join([*builtin, *sorted(points)]) or "none"
        raise ConfigError(
            f"{what} {value!r} is not known here (known are {known}; packages add names by the entry-point group "
            f"{group}); correct it, install its package here, or write MODULE:NAME"
        )
    return points[value].value.replace(" ", "").partition("[")[0]


def load(value: str, *, group: Group, what: str) -> Any:
    """Import the object that `value` names. It must be callable: a function or a class.

    Raises:
        ConfigError: it does not exist, cannot be imported, or is not callable.
    """
    path = resolve(value, group=group, what=what)
    _add_current_folder()
    with explain_errors(value, what=what, verb="cannot be imported"):
        found = import_object(path)
    if not callable(found):
        raise ConfigError(f"{what} {value!r} is a {type(found).__name__} and not a function or class; {remedy(what)}")
    return found


def build(value: str, *arguments: Any, group: Group, what: str, kind: Any) -> Any:
    """Call the class or function that `value` names, and return what it makes.

    Args:
        kind: the protocol that the made object must have; it is `runtime_checkable`.

    Raises:
        ConfigError: it cannot be loaded, or raises, or makes something else.
    """
    factory = load(value, group=group, what=what)
    with explain_errors(value, what=what, verb="failed"):
        made = factory(*arguments)
    if not isinstance(made, kind):
        raise ConfigError(
            f"{what} {value!r} made {made!r:.80}, which lacks members of {kind.__module__}.{kind.__name__}; add them "
            "(docs/extending.md)"
        )
    return made


def import_object(path: str) -> Any:
    """Return the object at MODULE:NAME, or raise whatever its import raises."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def find_module(path: str, *, what: str) -> ModuleSpec:
    """Find the module of MODULE:NAME. Neither it nor the packages above it are imported: they may be foreign code.

    Raises:
        ConfigError: there is no such module.
    """
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


@contextmanager
def explain_errors(value: str, *, what: str, verb: str) -> Iterator[None]:
    """Raise any exception of foreign code as a ConfigError that names the recipe's key; a TbaError stays as it is."""
    try:
        yield
    except TbaError:
        raise
    except (Exception, SystemExit) as error:  # foreign code raises anything, and may call sys.exit
        raise ConfigError(f"{what} {value!r} {verb} ({type(error).__name__}: {error}); {remedy(what)}") from error


def _add_current_folder() -> None:
    """Put the current folder on the path: the script `tba` does not have it there, and `python -m` has."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def remedy(what: str) -> str:
    """Return what to do about a plugin that cannot be used."""
    return f"correct {what}, install its package, or put the folder of its module on PYTHONPATH"
