"""What README's first command installs, and nothing else: the environment of a person who only wants to train.

The environment of the tests has more; what a recipe needs beyond that command would not be missed in it. Hidden are
whole top-level modules: of a namespace package that the command installs a part of, all parts stay.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import pairwise
from pathlib import Path

from packaging.requirements import Requirement  # pytest brings it
from packaging.utils import canonicalize_name

from tests.support.buffer import ROOT, SERVICE_PATHS

HOOK = ROOT / "tests" / "support" / "hidden_packages"
FOLDERS = {
    ROOT: "tba",
    **{ROOT / "services" / name: f"tba-{name}" for name in ("buffer", "reward", "searcher", "trainer")},
}
"""Folder -> distribution."""


def first_command() -> dict[str, str]:
    """Return the environment in which Python finds the first command's packages alone, and the working tree's code."""
    modules, distributions = hidden(reached(asked_for()))
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (*SERVICE_PATHS, HOOK))),
        "HIDDEN_PACKAGES": " ".join(sorted(modules)),
        "HIDDEN_DISTRIBUTIONS": " ".join(sorted(distributions)),
    }


def hidden(wanted: set[str]) -> tuple[set[str], set[str]]:
    """Return the top-level modules here of which no distribution is wanted, and their distributions."""
    found = {module: set(map(canonicalize_name, names)) for module, names in packages_distributions().items()}
    left = {module: names for module, names in found.items() if wanted.isdisjoint(names)}
    return set(left), set[str]().union(*left.values())


def reached(requirements: Iterable[Requirement]) -> set[str]:
    """Return the distributions that pip installs for the requirements: these, and what they need.

    Raises:
        PackageNotFoundError: a requirement is not installed here.
    """
    named = [(canonicalize_name(each.name), extra) for each in requirements for extra in ("", *each.extras)]
    todo, found = list(named), {("pip", "")}
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            if (name, extra) in named:
                raise
            continue  # another platform's
        for needed in map(Requirement, lines):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name for name, _ in found}


def asked_for() -> list[Requirement]:
    """Return what the Makefile asks pip for, of which a folder is the distribution in it.

    Raises:
        AssertionError: it asks for nothing.
    """
    target = "/nonexistent/.venv"
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    plan = subprocess.run(
        ["make", "-n", f"VENV={target}", f"{target}/.run"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [words for line in plan.stdout.splitlines() if (words := line.partition("/bin/pip install ")[2])]
    found = [each for line in lines for each in requirements_of(shlex.split(line, comments=True))]
    assert found, plan.stdout
    return found


def requirements_of(words: list[str]) -> Iterator[Requirement]:
    """Yield the requirements among the words after `pip install`.

    Raises:
        ValueError: an option that is not known here, or no requirement and no folder of the checkout.
    """
    for before, word in pairwise(["", *words]):
        if word.startswith("-"):
            if word not in ("-q", "-e", "-c", "--no-compile", "--no-build-isolation"):
                raise ValueError(f"tests/support/first_command.py does not know pip's option {word}")
        elif before != "-c":
            match = re.fullmatch(r"([^\[\]]+)(\[.*\])?", word)
            folder = None if match is None else FOLDERS.get(Path(ROOT, match[1]).resolve())
            yield Requirement(word if match is None or folder is None else folder + (match[2] or ""))
