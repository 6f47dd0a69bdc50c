"""Hide installed packages from every process with this folder on its path: HIDDEN_PACKAGES names top-level modules.

Python imports `sitecustomize` at its start; this one replaces any `sitecustomize` of the installation. Importing a
hidden module fails as if the module were not installed.
"""

import importlib.machinery
import os

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split())
find = importlib.machinery.PathFinder.find_spec


def find_spec(fullname, path=None, target=None):
    return None if fullname in HIDDEN else find(fullname, path, target)


if HIDDEN:
    importlib.machinery.PathFinder.find_spec = find_spec
