"""Rewards by task name. Each file in `tba_reward/rewards/`, and each plugin, defines `register(registry)`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tba_reward.rewards
from tba.errors import ConfigError, TbaError

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]
"""(prompt, response, data) -> reward. Raises BadDataError when `data` is not what the reward needs."""


class BadDataError(TbaError, ValueError):
    """The prompt's data is not what the reward needs, so that there is no score."""

    slug = "bad-data"
    status = 422


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A completion with a known reward, not 0, that is scored at start to see whether the reward works here."""

    prompt: str
    response: str
    data: Mapping[str, Any]
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """How one task is scored.

    Attributes:
        task: the name that prompts carry.
        version: stored with every reward; changes whenever the same input may give another number.
        function: a module-level function without state.
        fast: runs inside the service without a deadline; its time must be bounded by the length of the text.
    """

    task: str
    version: str
    function: RewardFunction
    example: Example
    fast: bool = False


class Registry:
    """The rewards of one service."""

    def __init__(self) -> None:
        self._rewards: dict[str, Reward] = {}

    def add(self, reward: Reward) -> None:
        """Add a reward.

        Raises:
            ConfigError: the task is taken, the example says nothing, or a worker process could not find the function.
        """
        if reward.task in self._rewards:
            raise ConfigError(f"reward for task {reward.task!r} is registered twice; rename one of them")
        if reward.example.reward == 0:
            raise ConfigError(f"reward for task {reward.task!r}: the example must be worth something other than 0")
        function = reward.function
        module = sys.modules.get(function.__module__)
        if not reward.fast and getattr(module, function.__qualname__, None) is not function:
            raise ConfigError(
                f"reward for task {reward.task!r}: {function.__qualname__} is not a function at the top level of its "
                "module, so that worker processes cannot import it; move it there"
            )
        self._rewards[reward.task] = reward

    def get(self, task: str) -> Reward | None:
        """The reward of a task, if there is one."""
        return self._rewards.get(task)

    def __iter__(self) -> Iterator[Reward]:
        return iter(self._rewards.values())

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks, sorted."""
        return sorted(self._rewards)


def load_registry(plugins: Sequence[str]) -> Registry:
    """The built-in rewards and those of the plugins.

    Args:
        plugins: names of Python modules.

    Raises:
        ConfigError: a plugin cannot be imported or has no `register`.
    """
    registry = Registry()
    for module in pkgutil.iter_modules(tba_reward.rewards.__path__, "tba_reward.rewards."):
        importlib.import_module(module.name).register(registry)
    for name in plugins:
        try:
            plugin = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a plugin is foreign code and may raise anything
            raise ConfigError(
                f"reward.plugins: module {name!r} cannot be imported ({type(error).__name__}: {error}); install it, or "
                "put its folder on PYTHONPATH"
            ) from error
        register = getattr(plugin, "register", None)
        if not callable(register):
            raise ConfigError(f"reward.plugins: module {name!r} does not define `register(registry)`")
        try:
            register(registry)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"reward.plugins: register() of module {name!r} failed ({type(error).__name__}: {error})"
            ) from error
    return registry
