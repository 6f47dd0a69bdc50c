"""Make functions of a script or notebook importable by the services, which are other processes.

A function of a module is imported from there. A function of a notebook or script is written, as source and never
pickled, into a module of its own. If it uses other names of the notebook, importing or calling it fails.
"""

from __future__ import annotations

import ast
import inspect
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from tba.errors import ConfigError

PREFIX = "own_"
"""Prefix of the modules that are written, so that they hide no other module."""
HEAD = '''"""Written by tba.run: the function {name!r}, as it was defined in {where}."""

from __future__ import annotations

'''


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that services can import."""

    path: str
    """MODULE:NAME."""
    source: str | None = None
    """Content of MODULE.py, if it has to be written."""
    import_folder: str | None = None
    """Folder of its module; None if every Python here finds the module."""

    @property
    def file_name(self) -> str:
        """The file of the module that has to be written."""
        return f"{self.path.partition(':')[0]}.py"


def named(function: Callable[..., Any], *, what: str) -> NamedFunction:
    """Return a function's import path, and the source of the module to write, if any. `what`: its name in errors."""
    if not isinstance(function, FunctionType):
        kind = f"a class ({function.__name__})" if isinstance(function, type) else f"a {type(function).__name__}"
        raise ConfigError(
            f"{what} is {kind} and not a function; give a function, or name an object of a module in "
            "the recipe as 'module:name'"
        )
    if _is_importable(function):
        file = Path(sys.modules[function.__module__].__file__ or "").resolve()
        folder = str(file.parents[function.__module__.count(".") + (file.name == "__init__.py")])
        # in front of the path, installed packages would hide the standard library
        installed = (*sysconfig.get_paths().values(), site.getusersitepackages())
        is_installed = folder in {str(Path(place).resolve()) for place in installed}
        path = f"{function.__module__}:{function.__qualname__}"
        return NamedFunction(path, import_folder=None if is_installed else folder)
    name = function.__name__
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (node,) = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        raise ConfigError(
            f"{what}: the source of {name!r} cannot be read (a plain Python prompt keeps none); define it "
            "in a notebook or in a file, and import it from there"
        ) from None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ConfigError(f"{what}: {name!r} is not defined by a `def` of its own; write one")
    where = "a notebook or script" if function.__module__ == "__main__" else f"module {function.__module__}"
    return NamedFunction(f"{PREFIX}{name}:{name}", source=HEAD.format(name=name, where=where) + source)


def _is_importable(function: FunctionType) -> bool:
    """Return whether importing its module gives this function; False for a script, which would run once more."""
    module = sys.modules.get(function.__module__)
    if module is None or function.__module__ == "__main__" or getattr(module, "__file__", None) is None:
        return False
    found: Any = module
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function
