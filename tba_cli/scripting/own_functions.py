"""Functions that a script or notebook hands over: how the services, which are other processes, import them.

A function of a module is named by it. One that was defined in a notebook or script is written, as source and never
pickled, into a module of its own; so it must be self-contained.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tba.errors import ConfigError

PREFIX = "own_"
"""Of the modules that are written, so that they hide no other."""
HEAD = '''"""Written by tba.run: the function {name!r}, as it was defined in {where}."""

from __future__ import annotations

'''
LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
STORES = ("STORE_NAME", "STORE_GLOBAL")


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that services can import."""

    path: str
    """MODULE:NAME."""
    source: str | None = None
    """What its module holds, where it has to be written: MODULE.py."""
    import_folder: str | None = None
    """Where its module was found, unless every Python here finds it."""

    @property
    def file_name(self) -> str:
        """The file of the module that has to be written."""
        return f"{self.path.partition(':')[0]}.py"


def named(function: Callable[..., Any], *, what: str) -> NamedFunction:
    """Return how services import a function.

    Args:
        what: the argument that it was given as, for errors.

    Raises:
        ConfigError: it is no plain function, its source cannot be read, or it needs something from outside.
    """
    if not isinstance(function, FunctionType):
        raise ConfigError(
            f"{what} is {_described(function)} and not a function; give a function, or name an object of a module in "
            "the recipe as 'module:name'"
        )
    if _is_importable(function):
        return NamedFunction(f"{function.__module__}:{function.__qualname__}", import_folder=_import_folder(function))
    name = function.__name__
    if name == "<lambda>":
        raise ConfigError(f"{what} is a lambda, which has no name to be imported by; define it with `def`")
    if function.__closure__:
        raise ConfigError(
            f"{what}: {name!r} uses {', '.join(map(repr, function.__code__.co_freevars))} of the function around it, "
            "or is what a decorator made; services import a function alone: define it outside, without a decorator"
        )
    source = _source(function, what=what)
    where = "a notebook or script" if function.__module__ == "__main__" else f"module {function.__module__}"
    text = HEAD.format(name=name, where=where) + source
    _check_self_contained(function, text, what=what)
    return NamedFunction(f"{PREFIX}{name}:{name}", source=text)


def _described(value: Any) -> str:
    return f"a class ({value.__name__})" if isinstance(value, type) else f"a {type(value).__name__}"


def _is_importable(function: FunctionType) -> bool:
    """Return whether importing its module gives this function. A script is not imported: it would run once more."""
    module = sys.modules.get(function.__module__)
    if module is None or function.__module__ == "__main__" or getattr(module, "__file__", None) is None:
        return False
    found: Any = module
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _import_folder(function: FunctionType) -> str | None:
    file = Path(sys.modules[function.__module__].__file__ or "").resolve()
    depth = function.__module__.count(".") + (file.name == "__init__.py")
    folder = str(file.parents[depth])
    # in front of the path, installed packages would hide the standard library
    return None if folder in {*sysconfig.get_paths().values(), site.getusersitepackages()} else folder


def _source(function: FunctionType, *, what: str) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (node,) = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        raise ConfigError(
            f"{what}: the source of {function.__name__!r} cannot be read (a plain Python prompt keeps none); define it "
            "in a notebook or in a file, and import it from there"
        ) from None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ConfigError(f"{what}: {function.__name__!r} is not defined by a `def` of its own; write one")
    if node.decorator_list:
        raise ConfigError(
            f"{what}: {node.name!r} has the decorator @{ast.unparse(node.decorator_list[0])}, which services would not "
            "have; leave it out, or put the function into a module and import it from there"
        )
    return source


def _check_self_contained(function: FunctionType, text: str, *, what: str) -> None:
    """Raise ConfigError where the module would lack a name. Annotations are not evaluated, so they may use any."""
    known = {*vars(builtins), "__name__", "__file__", function.__name__}
    for name in _global_names(compile(text, function.__name__, "exec")):
        if name in known:
            continue
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            remedy = f"write `import {value.__name__}{'' if value.__name__ == name else f' as {name}'}` inside it"
        elif (module := getattr(value, "__module__", "__main__")) not in ("__main__", None):
            remedy = f"write `from {module} import {getattr(value, '__name__', name)}` inside it"
        else:
            remedy = "import or define it inside the function"
        raise ConfigError(
            f"{what}: {function.__name__!r} uses {name!r} from outside; services import the function alone: {remedy}, "
            "or put both into a module (a .py file) and import the function from there"
        )


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names that code looks up outside of its functions, in the code of nested ones too."""
    # inspect.getclosurevars sees no comprehensions and nested functions, and takes attributes for globals
    stored = {step.argval for step in dis.get_instructions(code) if step.opname in STORES}
    yield from (
        step.argval for step in dis.get_instructions(code) if step.opname in LOADS and step.argval not in stored
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
