"""Hide installed packages from every process with this folder on its path: HIDDEN_PACKAGES names top-level modules.

Python imports `sitecustomize` at its start; this one takes the place of another that an installation may have. As where
they are not installed, hidden modules are not found, nor the versions of their distributions (HIDDEN_DISTRIBUTIONS).
"""

import importlib.machinery
import importlib.metadata
import os

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split())
DISTRIBUTIONS = frozenset(os.environ.get("HIDDEN_DISTRIBUTIONS", "").split())
find = importlib.machinery.PathFinder.find_spec
find_distribution = importlib.metadata.Distribution.from_name


def find_spec(fullname, path=None, target=None):
    return None if fullname in HIDDEN else find(fullname, path, target)


def from_name(name):
    if name and name.lower().replace("_", "-").replace(".", "-") in DISTRIBUTIONS:
        raise importlib.metadata.PackageNotFoundError(name)
    return find_distribution(name)


if HIDDEN:
    importlib.machinery.PathFinder.find_spec = find_spec
    importlib.metadata.Distribution.from_name = from_name
