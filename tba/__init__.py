"""tba: Trajectory Balance with Asynchrony, as services.

This package is the contract that the services share: wire formats, configuration, clients, the object store and the
command line. It never imports torch (tests/unit/repository/test_declared_dependencies.py).

In a script or a notebook, `tba.run(...)` runs a recipe, or a model with rows and reward functions, on this machine.
`tba.Run("name")` reads and steers a run (docs/python.md).
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"
_LAZY = ("Run", "run")


def __getattr__(name: str) -> Any:
    # only where they are asked for: services import this package, and their images hold no launcher;
    # editors and type checkers read __init__.pyi instead
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("tba_cli.scripting"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
