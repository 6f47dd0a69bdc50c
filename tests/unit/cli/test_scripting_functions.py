"""Functions that a script or notebook hands over: which are taken, what is written, what is refused."""

from __future__ import annotations

import functools
import importlib.util
import json
import linecache
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.errors import ConfigError
from tba_cli.scripting.own_functions import NamedFunction, named


def in_notebook(source: str, name: str = "f", **outside: Any) -> Callable[..., Any]:
    """Define a function as a cell of a notebook does."""
    text = textwrap.dedent(source)
    file = f"<cell {abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "__main__", **outside}
    exec(compile(text, file, "exec"), namespace)
    return namespace[name]


def imported(found: NamedFunction, folder: Path) -> Callable[..., Any]:
    """Import what would be written, as a service does."""
    assert found.source is not None
    (folder / found.file_name).write_text(found.source)
    spec = importlib.util.spec_from_file_location("own", folder / found.file_name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, found.path.partition(":")[2])


def at_the_top(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def test_a_function_of_a_module_is_named_by_it():
    found = named(at_the_top, what="objective")
    assert found.path == f"{__name__}:at_the_top"
    assert found.source is None
    assert found.import_folder == str(Path(__file__).resolve().parents[len(__name__.split(".")) - 1])
    # every Python finds an installed package: its folder would hide the standard library
    assert named(pytest.approx, what="objective").import_folder is None
    found = named(json.loads, what="objective")
    assert (found.path, found.import_folder) == ("json:loads", None)


def test_a_function_of_a_notebook_is_written_and_does_the_same(tmp_path: Path):
    function = in_notebook(
        '''
        def f(values: list[Missing], *, by: float = 2.0 * len("ab")) -> Tensor:
            """Its annotations name what services do not have."""
            import math

            def inner(value):
                return value * by if value > 1 else f([value + 1], by=by)[0]

            return [math.floor(inner(value)) for value in values if any(x == value for x in values)]
        '''
    )
    found = named(function, what="objective")
    assert (found.path, found.file_name, found.import_folder) == ("own_f:f", "own_f.py", None)
    again = imported(found, tmp_path)
    assert again([3, 0.5]) == function([3, 0.5]) == [12, 6]


def test_a_function_inside_another_one_is_written_if_it_takes_nothing_from_it(tmp_path: Path):
    def inside(values):
        return sorted(values)

    assert imported(named(inside, what="rewards[0]"), tmp_path)([2, 1]) == [1, 2]


def test_a_name_from_outside_is_an_error_of_the_import_or_of_the_first_call(tmp_path: Path):
    defaults = in_notebook("def f(x, most=LIMIT):\n    return x", LIMIT=3)
    with pytest.raises(NameError, match="LIMIT"):
        imported(named(defaults, what="rewards[1]"), tmp_path)
    body = in_notebook("def f(x):\n    return np.sum(x)", np=json)
    with pytest.raises(NameError, match="np"):
        imported(named(body, what="rewards[1]"), tmp_path)([1])
    decorated = in_notebook("@keep\ndef f(x):\n    return x", keep=lambda g: g)
    with pytest.raises(NameError, match="keep"):
        imported(named(decorated, what="objective"), tmp_path)


def test_what_is_no_function_of_its_own_is_refused():
    for value, says in [
        (in_notebook("f = lambda x: x"), "is not defined by a `def` of its own"),
        (functools.partial(at_the_top), "is a partial and not a function"),
        (Path, "is a class (Path) and not a function"),
        (3, "is a int and not a function"),
        ("".join, "is a builtin_function_or_method and not a function"),
    ]:
        with pytest.raises(ConfigError) as caught:
            named(value, what="objective")
        assert says in str(caught.value), value
        assert "objective" in str(caught.value)


def test_a_function_without_source_is_refused():
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(x):\n    return x", namespace)
    with pytest.raises(ConfigError, match="the source of 'f' cannot be read"):
        named(namespace["f"], what="objective")
