"""How a recipe names a built-in prompt generator."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from tba.api import Prompt
from tba.errors import ConfigError

PromptGenerator = Callable[[int, int, int], list[Prompt]]
"""(num_train, num_heldout, seed) -> prompts of both splits, disjoint from each other."""


def generator_names() -> list[str]:
    """Names of the built-in generators: the modules of this package that define `generate`."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(name for name in names if name != "base")


def load_generator(name: str) -> PromptGenerator:
    """The `generate` function of tba/tasks/<name>.py.

    Raises:
        ConfigError: no such task.
    """
    if name not in generator_names():
        raise ConfigError(f"unknown task generator {name!r}; built in: {', '.join(generator_names())}")
    return importlib.import_module(f"tba.tasks.{name}").generate
