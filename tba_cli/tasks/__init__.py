"""Sources of prompts that are code. `data.generator` of a recipe names one of them:

    NAME                a built-in task: tba_cli/tasks/NAME.py defines `generate`
    NAME                an entry point of the group `tba.prompt_sources` in an installed package
    MODULE:FUNCTION     a function of your own; modules in the current folder are found too

A source is a function as `PromptSource` describes it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tba.api import Prompt
from tba.errors import ConfigError, TbaError

ENTRY_POINTS = "tba.prompt_sources"
HINT = "correct data.generator, install its package, or put the folder of its module on PYTHONPATH"


class PromptSource(Protocol):
    """Makes the prompts of a run.

    `num_train`, `num_heldout` and `seed` are data.num_train, data.num_heldout and run.seed of the recipe. The result
    has prompts of both splits with different ids. It must depend on nothing but the arguments, because a resume makes
    the prompts again; held-out prompts should be the same for every seed. A ConfigError is shown to people as it is.
    """

    def __call__(self, num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
        """Return the prompts of both splits."""
        ...


def builtin_names() -> list[str]:
    """Return the names of the built-in tasks: the modules of this package."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def load_prompt_source(name: str) -> PromptSource:
    """Return the source that `data.generator` names.

    Raises:
        ConfigError: there is no such source, or it cannot be imported.
    """
    if name in builtin_names():
        return importlib.import_module(f"tba_cli.tasks.{name}").generate
    if ":" in name:
        return _checked(name, lambda: _import(name))
    plugins = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in plugins:
        known = ", ".join([*builtin_names(), *sorted(plugins)])
        raise ConfigError(f"unknown task generator {name!r}; there are {known}, and MODULE:FUNCTION names your own")
    return _checked(name, plugins[name].load)


def _checked(name: str, load: Callable[[], Any]) -> PromptSource:
    """Load a source that is not ours, and wrap it so that each of its errors names it."""
    with _explained(name, "cannot be imported"):
        source: Any = load()
    if not callable(source):
        raise ConfigError(f"data.generator {name!r} is a {type(source).__name__} and not a function; {HINT}")

    def prompts_of(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
        with _explained(name, "failed"):
            made: Any = source(num_train, num_heldout, seed)
            prompts = list(made)
        seen: set[str] = set()
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise ConfigError(f"data.generator {name!r} made {prompt!r:.60}; every item must be a tba.api.Prompt")
            if prompt.prompt_id in seen:
                raise ConfigError(f"data.generator {name!r} made the prompt_id {prompt.prompt_id!r} twice")
            seen.add(prompt.prompt_id)
        return prompts

    return prompts_of


def _import(name: str) -> Any:
    module_name, _, path = name.partition(":")
    # the script `tba` does not have the current folder on its path, and `python -m` has
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except TbaError:
        raise
    except Exception as error:  # foreign code raises anything
        raise ConfigError(f"data.generator {name!r} {what} ({type(error).__name__}: {error}); {HINT}") from None
