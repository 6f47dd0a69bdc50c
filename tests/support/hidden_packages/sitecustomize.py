"""Hide installed packages from every process with this folder on its path: HIDDEN_PACKAGES names top-level modules.

Python imports `sitecustomize` at its start. A hidden module is not found, as where it is not installed.
"""

import importlib.machinery
import os

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split())
find = importlib.machinery.PathFinder.find_spec


def find_spec(name, path=None, target=None):
    return None if name in HIDDEN else find(name, path, target)


importlib.machinery.PathFinder.find_spec = find_spec
