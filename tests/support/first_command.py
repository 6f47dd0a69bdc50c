"""What README's first command installs, and nothing else: the environment of a person who only wants to train.

The environment of the tests has more; what a recipe needs beyond that command would not be missed in it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from itertools import pairwise

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.buffer import ROOT, SERVICE_PATHS

HOOK = ROOT / "tests" / "support" / "hidden_packages"
NAMES = {".": "tba", **{f"services/{name}": f"tba-{name}" for name in ("buffer", "reward", "searcher", "trainer")}}
"""Folder -> distribution."""


def first_command() -> dict[str, str]:
    """Return the environment in which Python finds the first command's packages alone, and the working tree's code."""
    installed = reached()
    hidden = [
        module
        for module, distributions in packages_distributions().items()
        if installed.isdisjoint(map(canonicalize_name, distributions))
    ]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (*SERVICE_PATHS, HOOK))),
        "HIDDEN_PACKAGES": " ".join(sorted(hidden)),
    }


def reached() -> set[str]:
    """Return the distributions that the first command installs: what it names, and what these need."""
    found = {("pip", "")}
    todo = [(name, extra) for name, extras in asked_for() for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in _requires(name):
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name for name, _ in found}


def asked_for() -> Iterator[tuple[str, list[str]]]:
    """Yield the distributions that the Makefile asks pip for, with their extras."""
    target = "/nonexistent/.venv"
    plan = subprocess.run(
        ["make", "-n", f"VENV={target}", f"{target}/.run"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for line in plan.stdout.splitlines():
        if " install " not in line:
            continue
        words = shlex.split(line.partition(" install ")[2], comments=True)
        for before, word in pairwise(words):
            if word.startswith("-") or before == "-c":
                continue
            match = re.fullmatch(r"(?:\./)?([^\[\]]+)(?:\[(.*)\])?", word)
            assert match is not None, word
            name, extras = match.groups()
            yield canonicalize_name(NAMES.get(name, name)), extras.split(",") if extras else []


def _requires(name: str) -> list[str]:
    try:
        distribution(name)
    except PackageNotFoundError:
        return []  # another platform's
    return requires(name) or []
