"""Adapters: environments of other libraries, whose packages are optional (docs/environments.md)."""

from __future__ import annotations

import importlib
from importlib.metadata import distributions
from typing import Any

from tba.errors import not_installed


def required(module: str, package: str) -> Any:
    """Return a module; raise ConfigError, which names its package, if that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed("this environment", package) from error


def version_of(package: str) -> str:
    """Return name and version of a package, if it is installed; rollouts carry them."""
    return next((f"{package} {each.version}" for each in distributions(name=package)), package)
