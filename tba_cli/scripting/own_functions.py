"""Make functions and classes of a script or notebook importable by the services, which are other processes.

One of a module is imported from there. One of a notebook or script is written, as source and never pickled, into a
module of its own, with the imports that it uses. Any other name from outside of it is refused.
"""

from __future__ import annotations

import ast
import dis
import inspect
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tba.errors import ConfigError

PREFIX = "own_"
"""Prefix of the modules that are written, so that they hide no other module."""
HEAD = '''"""Written by tba.run: {name!r}, as it was defined in {where}."""

from __future__ import annotations

'''


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function or class that services can import."""

    path: str
    """MODULE:NAME."""
    source: str | None = None
    """Content of MODULE.py, if it has to be written."""
    import_folders: tuple[str, ...] = ()
    """Folders of its module, or of those that it imports, unless every Python here finds them."""

    @property
    def file_name(self) -> str:
        """The file of the module that has to be written."""
        return f"{self.path.partition(':')[0]}.py"


def named(
    function: Callable[..., Any], *, what: str, may_be_class: bool = False, needs_types: bool = False
) -> NamedFunction:
    """Return a function's import path, and the source of the module to write, if any.

    Args:
        what: its name in errors.
        may_be_class: whether a class is taken too.
        needs_types: whether its annotations are read, as those of tools; else they may name what services do not have.
    """
    if not isinstance(function, FunctionType) and not (may_be_class and isinstance(function, type)):
        kind = f"a class ({function.__name__})" if isinstance(function, type) else f"a {type(function).__name__}"
        wanted = "class" if may_be_class else "function"
        raise ConfigError(
            f"{what} is {kind} and not a {wanted}; give a {wanted}, or name an object of a module in "
            "the recipe as 'module:name'"
        )
    if _is_importable(function):
        path = f"{function.__module__}:{function.__qualname__}"
        return NamedFunction(path, import_folders=_folders_of(function.__module__))
    name = function.__name__
    try:
        source = _source_of(function)
        (node,) = ast.parse(source).body
    except (OSError, SyntaxError, TypeError, ValueError):
        raise ConfigError(
            f"{what}: the source of {name!r} cannot be read (a plain Python prompt keeps none); define it "
            "in a notebook or in a file, and import it from there"
        ) from None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise ConfigError(f"{what}: {name!r} is not defined by a `def` of its own; write one")
    where = "a notebook or script" if function.__module__ == "__main__" else f"module {function.__module__}"
    head, lines, folders = HEAD.format(name=name, where=where), list[str](), list[str]()
    needed = _from_outside(function, head + source)
    # of annotations, as far as it can be imported: some are for people alone
    typed = _from_outside(function, source) if needs_types else {}
    for outer, value in {**typed, **needed}.items():
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {outer}\n")
            # `import a.b` binds `a` alone, and another process has no a.b until something imports it
            parts = [part for part in list(sys.modules) if part.startswith(f"{value.__name__}.")]
            lines += [f"import {part}\n" for part in parts if f"{outer}{part[len(value.__name__) :]}" in source]
            folders += _folders_of(value.__name__)
        elif _is_importable(value) and "." not in value.__qualname__:
            lines.append(f"from {value.__module__} import {value.__qualname__} as {outer}\n")
            folders += _folders_of(value.__module__)
        elif outer in needed:
            raise ConfigError(
                f"{what}: {name!r} uses {outer!r}, which is defined outside of it, and it runs in another process; "
                "define that inside of it, or put both into a .py file and import it from there"
            )
    text = head + "".join(lines) + "\n\n" * bool(lines) + source
    return NamedFunction(f"{PREFIX}{name}:{name}", source=text, import_folders=tuple(dict.fromkeys(folders)))


def _from_outside(value: FunctionType | type, source: str) -> dict[str, Any]:
    """Return name and value of everything but builtins that the source reads from outside of it."""
    codes, read = [compile(source, "own", "exec", dont_inherit=True)], set[str]()
    for code in codes:  # functions and comprehensions in it are added meanwhile
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
        read |= {name for step, name in steps if step in ("LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")}
        # the body of a class reads its own names too
        own = {name for step, name in steps if step == "STORE_NAME"}
        read |= {name for step, name in steps if step == "LOAD_NAME"} - own
    around: dict[str, Any] = {} if isinstance(value, FunctionType) else dict(vars(sys.modules[value.__module__]))
    for function in _functions_of(value):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        around |= {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    return {
        name: around[name] for name in sorted(read & around.keys() - {value.__name__, "__name__", "__annotations__"})
    }


def _functions_of(value: FunctionType | type) -> list[FunctionType]:
    """Return the function, or those that a class itself defines; a decorator may have put others into it."""
    if isinstance(value, FunctionType):
        return [value]
    members = [getattr(member, "__func__", member) for member in vars(value).values()]
    functions = [member for member in members if isinstance(member, FunctionType)]
    return [each for each in functions if each.__globals__.get("__name__") == value.__module__]


def _source_of(value: FunctionType | type) -> str:
    """Return the source. `inspect` finds no class of a notebook, whose module has no file; but it finds a method."""
    for function in _functions_of(value) if isinstance(value, type) else ():
        with suppress(OSError):  # a method that was made
            lines, first = inspect.findsource(function)[0], function.__code__.co_firstlineno
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    begin = min(each.lineno for each in (node, *node.decorator_list))
                    if begin <= first <= (node.end_lineno or 0):
                        return textwrap.dedent("".join(lines[begin - 1 : node.end_lineno]))
    return textwrap.dedent(inspect.getsource(value))


def _is_importable(value: Any) -> bool:
    """Return whether importing its module gives this value; False for a script, which would run once more."""
    name = getattr(value, "__module__", None)
    module = sys.modules.get(name or "")
    has_file = getattr(module, "__file__", None) is not None or name in sys.builtin_module_names
    if module is None or name == "__main__" or not has_file:
        return False
    found: Any = module
    for part in getattr(value, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    return found is value


def _folders_of(module: str) -> tuple[str, ...]:
    """Return the folder from which a module is imported; nothing if every Python here finds it."""
    if (name := getattr(sys.modules[module], "__file__", None)) is None:
        return ()
    file = Path(name).resolve()
    folder = str(file.parents[module.count(".") + (file.name == "__init__.py")])
    # in front of the path, installed packages would hide the standard library
    places = (site.getusersitepackages(), str(sysconfig.get_config_var("DESTSHARED")))
    installed = (*sysconfig.get_paths().values(), *places)
    return () if folder in {str(Path(place).resolve()) for place in installed} else (folder,)
